"""`stride bench cost` and `stride simulate`: a table of the built-in model's steps, and what is simulated with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stridelm.bench.cost.record import Recorder, count_runs, record
from stridelm.bench.cost.settings import CostSettings
from stridelm.bench.results import read_results
from stridelm.bench.stand import open_engine
from stridelm.cli import bench_show
from stridelm.cli.main import main
from stridelm.engine.engine import Engine
from stridelm.schedule.limits import HOST_PATIENCE
from stridelm.simulate.settings import SimulationSettings
from stridelm.simulate.sweep import PLAIN_DECODING, fleet_of, jobs_of, read_variants, sweep
from stridelm.simulate.table import CostTable
from stridelm.simulate.table_file import read_table, write_table
from stridelm.types import Request

DEPTH, CONTEXTS = 2, (8, 40)
SMALL = CostSettings(
    drafters=("ngram",),
    depth=DEPTH,
    max_concurrency=(1, 4),
    contexts=CONTEXTS,
    rounds=1,
    num_prompts=3,
    max_tokens=12,
    scenario="repetition",
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(None, 4, ["ngram@auto"], max_num_batched_tokens=64, num_pages=256)


@pytest.fixture(scope="module")
def table(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> CostTable:
    """As it is written and read."""
    told: list[int] = []
    table = record(engine, SMALL, told.append)
    assert sum(told) == count_runs(SMALL, drafters=1)
    assert not engine.busy and engine.steps.planner.depths is engine.adaptive
    path = tmp_path_factory.mktemp("cost") / "table.json"
    write_table(table, path)
    return read_table(path)


@pytest.fixture(scope="module")
def path(table: CostTable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cost") / "table.json"
    write_table(table, path)
    return path


# Recording


def test_every_kind_of_step_is_recorded(table: CostTable) -> None:
    """For each number of requests and context: no draft, and drafts of each depth by one request, by half, by all."""
    assert list(table.drafters) == ["none", "ngram"]
    ngram = table.drafters["ngram"]
    assert ngram.rows_by_depth == (0, 1, 2) and ngram.usual_depth == DEPTH
    kinds = {1: {(1, 0), (2, 1), (3, 2)}, 4: {(4, 0), (5, 1), (6, 1), (8, 1), (6, 2), (8, 2), (12, 2)}}
    for requests, expected in kinds.items():
        mine = [point for point in ngram.decode if point.requests == requests]
        assert {(point.rows, point.depth) for point in mine} == expected and len(mine) == 2 * len(expected)
        for low, high in zip(*[iter(sorted(mine, key=lambda p: (p.rows, p.depth, p.context)))] * 2, strict=True):
            assert low.context < high.context and low.context >= 8
    assert {(point.requests, point.depth) for point in table.drafters["none"].decode} == {(1, 0), (4, 0)}
    assert {point.rows for point in ngram.prompts} == {3, 11, 23, 45, 64}
    assert len([point for point in ngram.prompts if point.rows == 64]) == 2  # one prompt, and two


def test_the_requests_are_recorded(table: CostTable, engine: Engine) -> None:
    assert table.scenario == "repetition" and len(table.requests) == 3
    for request in table.requests:
        assert request.prompt_tokens > 1 and request.max_tokens == 12
        assert len(request.chances["ngram"]) == DEPTH and all(0 <= chance <= 1 for chance in request.chances["ngram"])
    assert table.engine.num_pages == 256 and table.engine.max_num_batched_tokens == 64
    assert table.engine.max_model_len == engine.loaded.target.max_length


def test_steps_are_recorded_as_where_depths_are_chosen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step of requests with a depth of their own drafts that deep always, whatever the step is told. The
    deepest that is asked for stays."""
    seen: set[tuple[str | None, bool, int]] = set()
    add = engine.add

    def watched(*args: Any, **options: Any) -> Request:
        request = add(*args, **options)
        seen.add((request.speculation.drafter, request.adaptive, len(request.rows_by_depth) - 1))
        return request

    monkeypatch.setattr(engine, "add", watched)
    recorder = Recorder(engine, replace(SMALL, depth=7))
    recorder.round(0)
    assert seen == {("none", False, 0), ("ngram", True, 7)}


@pytest.mark.parametrize(("acceptance", "known"), [("exact", False), ("synthetic:2.5", True)])
def test_random_weights_say_nothing_of_acceptance(tmp_path: Path, acceptance: str, known: bool) -> None:
    """Unless it is simulated: then requests have the chances that were asked for."""
    engine = open_engine(None, 2, ["ngram@auto"], load_format="dummy", max_num_batched_tokens=64, num_pages=256)
    small = replace(SMALL, max_concurrency=(1,), contexts=(8,), acceptance=acceptance, max_tokens=60)
    requests = record(engine, small).requests
    assert all(bool(request.chances) == known for request in requests)
    if known:
        levels = [request.chances["ngram"][0] for request in requests]
        assert 0.6 < sum(levels) / len(levels) < 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contexts": (2040,)}, "lower contexts"),
        ({"contexts": (1000,)}, "raise num_pages"),
        ({"drafters": ("ngram@3",)}, "by name, such as ngram"),
        ({"drafters": ("ngram+prompt_lookup_min=2",)}, "by name, such as ngram"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded(engine: Engine, changes: dict[str, tuple[str, ...]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        record(engine, replace(SMALL, **changes))  # type: ignore[arg-type]
    assert not engine.busy


# Simulating


def test_a_stream_takes_what_its_steps_take(table: CostTable) -> None:
    """Plain decoding of one stream: the prompt's step, and one for each further token, at its context."""
    settings = SimulationSettings(max_concurrency=(1,), prompt_tokens=30, max_tokens=20, num_prompts=3)
    fleet, costs = fleet_of(table, PLAIN_DECODING, settings), table.drafters["none"]
    run = fleet.run(jobs_of(table, PLAIN_DECODING, settings, 3, 0), 1)
    decode = sum(costs.decoding.seconds(1, 1, 0, 30 + place) for place in range(19))
    assert run.seconds == pytest.approx(3 * (costs.reading.seconds(30, 14.5) + decode))


def test_cells_are_those_of_a_sweep(table: CostTable) -> None:
    settings = SimulationSettings(
        max_concurrency=(1, 4), request_rate=(50.0,), num_prompts=8, repeats=2, slo=("ttft=1000000",), cards=2
    )
    told: list[str] = []
    cells = sweep(table, settings, told.append)
    assert [cell.label for cell in cells] == ["plain", "ngram@2", "ngram@auto"] * 3
    assert [cell.load for cell in cells[::3]] == ["1 stream", "4 streams", "50 requests/s"]
    for cell in cells:
        assert (cell.scenario, cell.target, cell.simulated) == ("repetition", "simulated", True)
        assert (cell.figures.requests, cell.figures.errors, cell.figures.completion_tokens) == (16, 0, 16 * 12)
        assert cell.figures.met_share == 1.0 and (cell.speed is None) == (cell.label == "plain")
    assert sweep(table, settings) == cells


def test_more_accepted_is_faster(table: CostTable) -> None:
    """A mix lies between its parts."""

    def rate(*acceptance: str) -> float:
        settings = SimulationSettings(
            drafters=("ngram@2",), max_concurrency=(2,), acceptance=acceptance, prompt_tokens=10, max_tokens=300
        )
        figures = sweep(table, settings)[1].figures
        assert figures.tokens_per_step is not None
        return figures.tokens_per_step

    low, mixed, high = rate("1.2"), rate("1.2", "2.8"), rate("2.8")
    assert low == pytest.approx(1.2, rel=0.05) and high == pytest.approx(2.8, rel=0.05)
    assert low < mixed < high


@pytest.mark.parametrize(
    ("entries", "labels"),
    [((), ["ngram@2", "ngram@auto"]), (("ngram@1", "none", "plain", "ngram@1"), ["ngram@1"])],
)
def test_ways_of_decoding(table: CostTable, entries: tuple[str, ...], labels: list[str]) -> None:
    assert [variant.label for variant in read_variants(entries, table)] == labels


# The commands


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Record, simulate, measure, and set the two side by side."""
    pytest.importorskip("matplotlib")
    table, runs, page = tmp_path / "new" / "t.json", tmp_path / "runs.jsonl", tmp_path / "r.html"
    small = ["--max-concurrency", "1,2", "--max-tokens", "6", "--num-prompts", "2"]
    grid = ["--drafters", "mtp", "--depth", "1", "--rounds", "1", "--contexts", "8", "--max-num-batched-tokens", "32"]
    assert main(["bench", "cost", *small, *grid, "--table", str(table)]) == 0
    assert "points of none, mtp" in capsys.readouterr().out
    recorded = read_table(table)
    assert (recorded.engine.patience, recorded.engine.apart) == (HOST_PATIENCE, True)
    assert [costs.may_wait for costs in recorded.drafters.values()] == [False, True]
    ways = ["--drafters", "mtp@1,mtp@auto", "--repeats", "2"]
    output = ["--json", str(runs), "--report", str(page)]
    assert main(["simulate", str(table), *small, *ways, *output]) == 0
    shown = capsys.readouterr().out
    assert "mtp@auto" in shown and "nothing was run" in shown and "code-completion" in shown
    [run] = read_results(runs)
    assert run["benchmark"] == "simulate" and len(run["rows"]) == 6
    assert page.read_text(encoding="utf-8").count("<svg") == 4

    measured = tmp_path / "measured.jsonl"
    assert main(["bench", "sweep", "--scenarios", "repetition", *small, *ways, "--json", str(measured)]) == 0
    assert [row["label"] for row in read_results(measured)[0]["rows"]] == ["plain", "mtp@1", "mtp@auto"] * 2
    capsys.readouterr()
    both = ["--runs", str(measured), str(runs)]
    assert main(["bench", "compare", *both, "--report", str(tmp_path / "c.md")]) == 0
    assert "ratio: the second over the first" in capsys.readouterr().out
    assert (tmp_path / "c.md").read_text(encoding="utf-8").count("| mtp@auto |") == 2
    assert main(["bench", "compare", *both, "--num-prompts", "3", "--threads", "1"]) == 2
    assert "num_prompts, threads would have no effect on recorded runs" in capsys.readouterr().err


def test_runs_that_have_nothing_in_common(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for streams, file in zip(("1", "2"), files):
        assert main(["simulate", str(path), "--max-concurrency", streams, "--json", str(file)]) == 0
    assert main(["bench", "compare", "--runs", *map(str, files[:2])]) == 2
    assert "measure the same ones in both" in capsys.readouterr().err
    files[2].write_text(json.dumps({"benchmark": "latency", "rows": []}) + "\n", encoding="utf-8")
    assert main(["bench", "compare", "--runs", str(files[0]), str(files[2])]) == 2
    assert "c.jsonl has no run of serving, sweep, simulate" in capsys.readouterr().err


def test_streams_that_only_queue_are_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has steps of up to 4 requests."""
    options = ["--drafters", "none", "--cards", "2", "--num-prompts", "12", "--max-tokens", "4"]
    assert main(["simulate", str(path), *options, "--max-concurrency", "8,12"]) == 0
    said = capsys.readouterr().out
    assert "12 streams: 8 run at once, 4 only wait in the queue" in said and "8 streams: " not in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--drafters", "mask@2"], "unknown drafter in the table mask; known: ngram, none"),
        (["--drafters", "ngram"], "write NAME@DEPTH or NAME@auto"),
        (["--drafters", "ngram@3"], "depths 1 to 2"),
        (["--max-concurrency", ""], "there is no load"),
        (["--max-concurrency", "9", "--num-prompts", "8"], "raise num_prompts"),
        (["--routing", "round-robin"], "no effect on one card"),
        (["--max-num-seqs", "5"], "steps of up to 4 requests"),
        (["--acceptance", "4"], "1 to 3 tokens per step"),
        (["--acceptance", "1.5", "--drafters", "none"], "no effect on plain decoding"),
        (["--prompt-tokens", "2040", "--max-tokens", "20"], "longer than the context of 2048"),
        (["--num-pages", "2", "--prompt-tokens", "40"], "raise num_pages"),
        (["--slo", "ttft"], "cannot be read"),
        (["--repeats", "0"], "repeats must be an integer from 1"),
        (["--report", "a.pdf"], "must end in .md or .html"),
        (["--json", "/dev/null/a.jsonl"], "cannot write /dev/null/a.jsonl"),
    ],
)
def test_what_is_refused(path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(path), *options]) == 2
    assert words in capsys.readouterr().err


def test_acceptance_must_be_known(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_show, "PIPED_WIDTH", 400)  # no name is cut into lines, however wide the figures are
    table = replace(read_table(path), requests=())
    write_table(table, tmp_path / "bare.json")
    assert main(["simulate", str(tmp_path / "bare.json")]) == 2
    assert "give acceptance" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "bare.json"), "--acceptance", "2.0", "--num-prompts", "8"]) == 0
    assert "128 prompt tokens, 128 output tokens, accepted 2.0" in capsys.readouterr().out
