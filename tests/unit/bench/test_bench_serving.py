"""`stride bench serving` and `sweep` on the built-in model: in process, and against a real server."""

from __future__ import annotations

import re
import socket
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

import pytest

from stridelm.bench.http.server import Server
from stridelm.bench.results import read_results
from stridelm.bench.serving.cells import Side, alternate, asks_of, count_runs, measure
from stridelm.bench.serving.in_process import InProcess
from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.record import Run
from stridelm.bench.serving.remote import Remote
from stridelm.bench.serving.settings import ServingSettings, SweepSettings
from stridelm.bench.serving.target import Ask, Way
from stridelm.cli.main import main
from support.doubles.server import Served, gauges, serving

GENERATED = "stride_generation_tokens_total"
SHORT: dict[str, Any] = {"num_prompts": 3, "num_warmups": 1, "max_tokens": 6, "repeats": 2}
OPTIONS = ["--num-prompts", "2", "--num-warmups", "1", "--max-tokens", "5", "--repeats", "1"]


class Watched(InProcess):
    """Notes what is asked of the engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[str] = []

    def run(self, asks: Sequence[Ask], load: Load, arrivals: Sequence[float] | None, way: Way) -> Run:
        self.seen.append(f"{way.label} {len(asks)}")
        return super().run(asks, load, arrivals, way)

    def flush(self) -> None:
        self.seen.append("flush")
        super().flush()


@pytest.fixture(scope="module")
def local() -> Watched:
    opened = Watched.open(None, 4, 0.0, True, max_model_len=512)
    assert isinstance(opened, Watched)
    return opened


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("bench"), "--drafter", "ngram") as served:
        yield served


# In process


@pytest.mark.parametrize("load", [{"max_concurrency": 2}, {"request_rate": 50.0}])
def test_a_cell_and_plain_decoding_beside_it(local: Watched, load: dict[str, Any]) -> None:
    settings = ServingSettings(**SHORT, **load, scenario="short-question", slo=("e2el=100000",))
    told: list[str] = []
    plain, ngram = measure(local, ["ngram@2"], ["short-question"], settings, told.append)
    assert (plain.label, ngram.label) == ("plain", "ngram@2")
    for cell in (plain, ngram):
        assert (cell.figures.requests, cell.figures.completion_tokens, cell.figures.errors) == (6, 36, 0)
        assert cell.figures.met_share == 1.0 and cell.figures.client_busy is None
    assert plain.figures.tokens_per_step == 1.0 and plain.speed is None and plain.identical_outputs is None
    assert ngram.identical is True and ngram.identical_outputs == 3
    assert ngram.speed is not None and ngram.pace is not None
    assert len(ngram.speed.runs) == len(ngram.pace.runs) == 2
    assert len(told) == count_runs(local, ["ngram@2"], settings) == 6


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ("cold", ["plain 1", "ngram@2 1", *["flush", "plain 3", *["flush", "ngram@2 3"] * 2, "flush", "plain 3"]]),
        ("warm", ["plain 3", "ngram@2 3", "plain 3", *["ngram@2 3"] * 2, "plain 3"]),
    ],
)
def test_runs_take_turns(local: Watched, cache: Any, expected: list[str]) -> None:
    """Each turn begins with another, after a warm-up that is dropped; a warm cache has seen every prompt, a cold one is
    flushed before each run."""
    more = {**SHORT, "num_warmups": 1 if cache == "cold" else None}
    settings = ServingSettings(**more, scenario="short-question", prefix_cache=cache)
    local.seen.clear()
    asks = asks_of("short-question", settings, True)
    sides = [Side(local, local.plain()), Side(local, local.way("ngram@2"))]
    runs = alternate(sides, asks, Load(1), settings, lambda what: None, "")
    assert local.seen == expected
    assert [len(each) for each in runs] == [2, 2]


def test_outputs_of_several_lengths() -> None:
    """The same for every way and in every run, around the length that was asked for."""
    alike, settings = ServingSettings(num_prompts=40), ServingSettings(num_prompts=40, max_tokens=50, range_ratio=0.4)
    lengths = [ask.max_tokens for ask in asks_of("short-question", settings, True)]
    assert lengths == [ask.max_tokens for ask in asks_of("short-question", settings, True)]
    assert 30 <= min(lengths) < 36 and 64 < max(lengths) <= 70 and 45 < statistics.mean(lengths) < 55
    assert len({ask.max_tokens for ask in asks_of("short-question", alike, True)}) == 1
    assert min(ask.max_tokens for ask in asks_of("repetition", replace(settings, max_tokens=1), True)) == 1


def test_as_many_requests_warm_up_as_there_are_streams() -> None:
    settings = ServingSettings(num_prompts=6)
    assert [settings.warm_up(load) for load in (Load(4), Load(32), Load(request_rate=1.0))] == [4, 6, 6]
    assert ServingSettings(num_prompts=6, num_warmups=0).warm_up(Load(4)) == 0


def test_plain_decoding_alone_has_nothing_beside_it(local: Watched) -> None:
    [cell] = measure(local, ["none"], ["repetition"], ServingSettings(**SHORT))
    assert cell.label == "plain" and cell.speed is None


def test_lossy_and_simulated_ways_are_marked(local: Watched) -> None:
    trusted, simulated = local.way("mask@2:trust"), local.way("ngram@3:synthetic:2.5")
    assert (trusted.label, trusted.lossless, trusted.repeats) == ("mask@2:trust*", False, False)
    assert simulated.simulated and local.way("ngram@2").repeats
    chosen = local.way("mask@auto")
    assert (chosen.label, chosen.lossless) == ("mask@auto", True)


def test_depths_that_are_chosen(local: Watched) -> None:
    """They are the default of the engine that is measured, whose outputs are plain decoding's."""
    options = local._engine.config
    target = InProcess.open(options.model, 4, 0.0, True, ["ngram@2", "mask@auto"], mask_token_id=options.mask_token_id)
    assert (target._engine.config.drafter, target._engine.config.depth) == ("mask", "auto")
    plain, chosen = measure(target, ["mask@auto"], ["short-question"], ServingSettings(**SHORT))
    assert (plain.label, chosen.label, chosen.identical) == ("plain", "mask@auto", True)
    assert plain.figures.tokens_per_step == 1.0 and chosen.over_best is None


def test_chosen_depths_are_compared_with_the_best_of_the_others(local: Watched) -> None:
    """Of plain decoding and the same drafter's fixed depths."""
    settings = ServingSettings(**{**SHORT, "repeats": 3})
    entries = ["ngram@1", "ngram@2", "ngram@auto", "mtp@1"]
    cells = {cell.label: cell for cell in measure(local, entries, ["short-question"], settings)}
    speeds = {label: cell.speed.runs for label, cell in cells.items() if cell.speed is not None}
    best = max([(1.0,) * 3, speeds["ngram@1"], speeds["ngram@2"]], key=statistics.median)
    [chosen] = [cell for cell in cells.values() if cell.over_best is not None]
    assert chosen.label == "ngram@auto" and chosen.over_best is not None
    assert chosen.over_best.runs == pytest.approx([mine / its for mine, its in zip(speeds["ngram@auto"], best)])


def test_a_policy_learns_from_its_own_runs_alone() -> None:
    target = InProcess.open(None, 4, 0.0, True, ["ngram@auto"], max_model_len=512)
    assert target._engine.adaptive is not None
    cost = target._engine.adaptive.cost
    for entry, learnt in (("ngram@2", False), ("ngram@auto", True)):
        measure(target, [entry], ["short-question"], ServingSettings(**SHORT))
        assert (cost.knows_decodes, cost.knows_prompts) == (learnt, learnt)


def test_a_sweep_has_a_cell_for_everything(local: Watched) -> None:
    settings = SweepSettings(
        **{**SHORT, "repeats": 1, "num_prompts": 2, "max_tokens": 3},
        scenarios=("short-question", "multi-turn"),
        max_concurrency=(1, 2),
        request_rate=(100.0,),
        drafters=("ngram@2", "mask@1:trust"),
    )
    cells = measure(local, list(settings.drafters), list(settings.names), settings)
    assert [(cell.scenario, cell.load, cell.label) for cell in cells] == [
        (scenario, load, label)
        for scenario in ("short-question", "multi-turn")
        for load in ("1 stream", "2 streams", "100 requests/s")
        for label in ("plain", "ngram@2", "mask@1:trust*")
    ]
    assert all(cell.figures.requests == 2 for cell in cells)


def test_losses_are_the_models(local: Watched) -> None:
    """Plain decoding's own continuation is likelier than another prompt's."""
    settings = ServingSettings(**SHORT, scenario="code-completion")
    asks = asks_of("code-completion", settings, True)
    own = local.run(asks, Load(2), None, local.plain()).answered
    mine, others = local.losses(asks, own), local.losses(asks, [*own[1:], own[0]])
    assert all(loss is not None and loss > 0 for loss in mine)
    assert sum(filter(None, mine)) < sum(filter(None, others))


# Against a server


@pytest.mark.parametrize("backend", ["openai", "sglang"])
@pytest.mark.parametrize("load", [Load(2), Load(request_rate=30.0)])
def test_a_server_answers_what_the_engine_does(served: Served, local: Watched, backend: str, load: Load) -> None:
    """The same tokens for every API and load, and as many as the server counted."""
    settings = ServingSettings(**SHORT, scenario="multi-turn")
    asks = asks_of("multi-turn", settings, True)
    remote = Remote(Server.at(served.url), backend, 0.0)
    way = remote.way("ngram@3")
    before = gauges(served)[GENERATED]
    run = remote.run(asks, load, load.arrivals(3, 0), way)
    assert not run.errors and run.tokens == 18 == gauges(served)[GENERATED] - before
    ours = local.run(asks, Load(2), None, local.plain()).answered
    assert [each.token_ids for each in run.answered] == [each.token_ids for each in ours]
    assert [each.prompt_tokens for each in run.answered] == [each.prompt_tokens for each in ours]
    for each in run.answered:
        assert list(each.at) == sorted(each.at) and 1 <= len(each.at) <= each.tokens
        assert each.steps is not None and 1 <= each.steps <= 6
    assert run.client_busy is not None and 0 <= run.client_busy <= 1


def test_chats_are_sent_as_messages(served: Served) -> None:
    remote = Remote(Server.at(served.url), "openai-chat", 0.0)
    asks = asks_of("multi-turn", ServingSettings(**SHORT), True)
    run = remote.run(asks, Load(1), None, remote.way(None))
    assert not run.errors and run.tokens == 18


def test_a_server_says_what_it_does_by_default(served: Served) -> None:
    remote = Remote(Server.at(served.url), "openai", 0.0)
    assert re.fullmatch(r"ngram@\d+", remote.way(None).label)
    assert remote.way("none") == remote.way("ngram@0") == remote.plain()
    assert remote.way("mask@2:trust").label == "mask@2:trust*"
    assert remote.way("mask@auto").label == "mask@auto"
    with pytest.raises(ValueError, match="refuses the speculation"):
        remote.way("ngram@500")


def test_losses_are_the_same_over_http(served: Served, local: Watched) -> None:
    asks = asks_of("repetition", ServingSettings(**SHORT), True)
    run = local.run(asks, Load(2), None, local.plain())
    remote = Remote(Server.at(served.url), "openai", 0.0)
    assert remote.losses(asks, run.answered) == pytest.approx(local.losses(asks, run.answered), abs=1e-4)


def test_what_a_server_refuses_are_errors(served: Served) -> None:
    """One bad request is an error of the run; if nothing is answered, there is no run."""
    remote = Remote(Server.at(served.url), "openai", 0.0)
    good = asks_of("short-question", ServingSettings(**SHORT), True)
    long = asks_of("long-document", ServingSettings(**SHORT), True)
    run = remote.run([*good, long[0]], Load(2), None, remote.way(None))
    assert run.completions[3] is None and len(run.answered) == 3
    [error] = run.errors
    assert error.startswith("request 3: ") and "400" in error
    with pytest.raises(ValueError, match="answered no request; the first error: request 0"):
        measure(remote, [None], ["long-document"], ServingSettings(**SHORT, url=served.url, scenario="long-document"))


def test_a_server_that_is_gone_is_an_error(served: Served) -> None:
    asks = asks_of("short-question", ServingSettings(**SHORT), True)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        remote = Remote(replace(Server.at(served.url), port=nobody.getsockname()[1]), "openai", 0.0)
        with pytest.raises(ValueError, match="takes no connections"):
            remote.run(asks, Load(1), None, Way("plain", "off", True, False))


# The command


def test_serving_in_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    record, page = tmp_path / "runs.jsonl", tmp_path / "report.html"
    more = [
        "--scenario",
        "repetition",
        "--drafter",
        "ngram@2",
        "--max-concurrency",
        "2",
        "--slo",
        "ttft=90000,tpot=9000",
    ]
    assert main(["bench", "serving", *OPTIONS, *more, "--json", str(record), "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "ngram@2" in shown and "flushed before every run" in shown and "(100%)" in shown
    [run] = read_results(record)
    assert run["benchmark"] == "serving" and run["settings"]["scenario"] == "repetition"
    assert [row["label"] for row in run["rows"]] == ["plain", "ngram@2"]
    assert set(run["rows"][1]["speed"]) == {"median", "low", "high", "runs"}
    assert set(run["rows"][0]["itl_ms"]) == {"p50", "p95", "p99"}
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 4 and "ngram@2" in text
    assert not re.search(r'(?:src|href)="(?!#)', text)  # nothing is loaded from elsewhere


def test_sweep_of_a_server(served: Served, tmp_path: Path) -> None:
    """Markdown with its charts beside it."""
    pytest.importorskip("matplotlib")
    report = tmp_path / "new" / "sweep.md"
    more = ["--url", served.url, "--scenarios", "short-question", "--max-concurrency", "1,2", "--drafters", "ngram@2"]
    assert main(["bench", "sweep", *OPTIONS, *more, "--report", str(report)]) == 0
    text = report.read_text(encoding="utf-8")
    charts = re.findall(r"\]\((sweep-\d\.svg)\)", text)
    assert len(charts) == 4 and "| short-question | 2 streams | ngram@2 |" in text
    for chart in charts:
        assert ElementTree.fromstring((report.parent / chart).read_text(encoding="utf-8")).tag.endswith("svg")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--scenario", "chess"], "unknown scenario chess"),
        (["--max-concurrency", "2", "--request-rate", "2"], "give one of the two"),
        (["--max-concurrency", "32"], "no effect on 16 requests; raise num_prompts"),
        (["--backend", "sglang"], "backend would have no effect in process"),
        (["--slo", "ttft"], "cannot be read"),
        (["--slo", "itl=5"], "by ttft, tpot and e2el, as in vLLM"),
        (["--drafter", "nobody"], "unknown drafter"),
        (["--document-chars", "9000"], "no effect on code-completion"),
        (["--prefix-cache", "warm", "--num-warmups", "3"], "warmed by every prompt"),
        (["--report", "report.pdf"], "must end in .md or .html"),
        (["--temperature", "nan"], "temperature must be"),
        (["--num-prompts", "0"], "num_prompts must be at least 1"),
        (["--range-ratio", "1"], "range_ratio must be a share from 0 to below 1"),
        (["--url", "ftp://x"], "write http://host:port"),
        (["--url", "x", "--prefix-cache", "off"], "start the server without its cache"),
    ],
)
def test_options_that_cannot_be_are_refused(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serving", *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["latency", "--json"],
        ["acceptance", "--json"],
        ["serving", "--json"],
        ["sweep", "--report"],
        ["compare", "--json"],
        ["cost", "--table"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_first(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when all is measured: no engine is opened before."""
    monkeypatch.delattr("stridelm.bench.stand.start")
    (tmp_path / "file").write_text("", encoding="utf-8")
    for path in (tmp_path / "file" / "r.html", tmp_path):
        assert main(["bench", *options, str(path)]) == 2
        assert f"cannot write {path}: " in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_options_of_the_engine_are_not_for_servers(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serving", "--url", served.url, "--max-model-len", "64", "--threads", "1"]) == 2
    assert "max_model_len, threads would have no effect on a server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "/v1/models was answered with status 404 and text/html)"),
        ("/site", "/v1/models was answered with status 200 and text/html, which is no such list)"),
    ],
)
def test_a_server_of_something_else(path: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, without its page."""
    page = tmp_path / "site" / "v1" / "models" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text("<html>\nHello\n</html>", encoding="utf-8")

    class Pages(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Pages) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}{path}"
        assert main(["bench", "serving", "--url", url]) == 2
        server.shutdown()
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert error.endswith("is a server with OpenAI's API running there?\n") and "<" not in error


def test_models_are_chosen_by_name(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serving", "other", "--url", served.url]) == 2
    assert "has no model 'other'; it serves built-in" in capsys.readouterr().err


def test_outputs_that_the_context_has_no_room_for(local: Watched) -> None:
    """They would be cut where each is to be as long as asked; the largest that fits runs."""
    settings = ServingSettings(**{**SHORT, "max_tokens": 600}, scenario="short-question", drafter="none")
    with pytest.raises(ValueError, match=r"max_tokens 600: .* room for \d+ in the context of 512; lower") as caught:
        measure(local, ["none"], ["short-question"], settings)
    room = int(str(caught.value).split("room for ")[1].split()[0])
    for most in (room, room + 1):
        asks = asks_of("short-question", replace(settings, max_tokens=most), ignore_eos=True)
        with nullcontext() if most == room else pytest.raises(ValueError, match="lower max_tokens"):
            local.check(asks)
    local.check(asks_of("short-question", settings, ignore_eos=False))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--scenarios", ""], "scenarios names none"),
        (["--max-concurrency", ""], "there is no load"),
        (["--scenarios", "chess"], "unknown scenario chess"),
        (["--scenarios", "all,repetition"], "all stands alone"),
    ],
)
def test_sweeps_of_nothing_are_refused(wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sweep", *wrong]) == 2
    assert says in capsys.readouterr().err
