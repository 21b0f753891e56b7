"""The closed loop over HTTP, against a real server of the built-in model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import http_load
import live_load
import pytest
from http_client import Job
from http_options import Settings, read_options
from http_servers import started, stride_command
from load_requests import KINDS, stream_of

from stridelm.bench.http.server import Server
from stridelm.bench.results import read_results
from support.doubles.server import Served, gauges, serving

STREAMS = 4
GENERATED = "stride_generation_tokens_total"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("load"), "--max-model-len", "1024", "--drafter", "none") as served:
        yield served


def settings_of(served: Served, *more: str) -> Settings:
    options = ["--url", served.url, "--kind-streams", str(STREAMS), "--streams", str(STREAMS)]
    return read_options(None, [*options, "--warm-up", "0.2", "--seconds", "0.5", *more]).settings


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_counted(served: Served, kind: str) -> None:
    """As many as the server generated, and as many as were asked for; one event for each or fewer, in order."""
    server = Server.at(served.url)
    before = gauges(served)[GENERATED]
    job = Job(
        server.host,
        server.port,
        server.path("/v1/completions"),
        server.model,
        kind,
        ("ngram@3", "mask@auto", "mtp@3"),
        STREAMS,
    )
    begin, [report] = http_load.run_clients(job, settings_of(served))
    streamed: list[dict[str, Any]] = report["streamed"]
    assert not report["errors"]
    assert len(streamed) >= STREAMS
    assert sum(each["tokens"] for each in streamed) == gauges(served)[GENERATED] - before
    asked = [next(stream_of(index, STREAMS)).max_tokens for index in range(STREAMS)]
    if kind != "json_schema":
        assert sorted(asked) == sorted(
            each["tokens"] for each in sorted(streamed, key=lambda one: one["sent"])[:STREAMS]
        )
    for each in streamed:
        times = [begin, each["sent"], *each["at"]]
        assert times == sorted(times) and 1 <= len(each["at"]) <= each["tokens"]


def test_what_a_server_refuses_is_an_error_of_its_row(served: Served) -> None:
    server, settings = Server.at(served.url), settings_of(served, "--drafters", "nonsense")
    row, errors = http_load.measure(server, "drafters", STREAMS, [], settings)
    assert row.errors == len(errors) == STREAMS and row.requests == 0 and row.tokens_per_s == 0
    assert all("nonsense" in error for error in errors)


def test_servers_are_compared_in_one_table(served: Served, tmp_path: Path) -> None:
    """Two addresses of a server: a row for each and load, ratios to its own plain one, a record and a chart."""
    other = served.url.replace("127.0.0.1", "localhost") + "/v1/"
    record, chart = tmp_path / "load.jsonl", tmp_path / "load.svg"
    options = [
        "--url",
        served.url,
        "--url",
        other,
        "--streams",
        "2",
        "--kinds",
        "plain,logprobs",
        "--kind-streams",
        "2",
    ]
    options += ["--warm-up", "0.2", "--seconds", "1", "--json", str(record), "--plot", str(chart)]
    assert http_load.main(options) == 0
    [run] = read_results(record)
    names = [served.url.removeprefix("http://"), other.removeprefix("http://").removesuffix("/v1/")]
    assert [(row["name"], row["load"]) for row in run["rows"]] == [
        (name, load) for load in ("2", "2, logprobs") for name in names
    ]
    for row in run["rows"]:
        assert row["errors"] == 0 and row["tokens_per_s"] > 0
        assert (row["over_plain"] is None) == (row["kind"] == "plain")
    assert all(name in chart.read_text(encoding="utf-8") for name in names)


@pytest.mark.parametrize("load_of", ["closed3", "4", "burst"])
def test_loads_in_process(load_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one ends, and leaves nothing in the engine."""
    monkeypatch.setattr(live_load, "BURST", 3)
    monkeypatch.setattr(live_load, "OUTPUT", (2, 8))
    settings = live_load.LiveSettings(("plain",), (load_of,), 0.5, 0.2, 0, 4, "startup", tiny=True, itl_target_ms=40)
    engine = live_load.open_engine(Path(), "plain", settings)
    row = live_load.measure(engine, "plain", load_of, settings)
    assert row.requests >= (2 if load_of == "4" else 3) and row.tokens_per_s > 0
    assert not engine.busy
    engine.check()


def test_a_server_is_started_and_stopped(tmp_path: Path) -> None:
    with started("stride", stride_command({"max_model_len": 64}, 2, "--max-queue 7"), tmp_path / "log") as server:
        assert server.model == "built-in"
        address = f"http://{server.host}:{server.port}"
    with pytest.raises(ValueError, match="is a server with OpenAI's API running there"):
        Server.at(address)


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    server = started("stride", stride_command({}, 0, ""), tmp_path / "log")
    with pytest.raises(RuntimeError, match="max_num_seqs must be an integer from 1"), server:
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--serve", "sglang"], "give others by --url"),
        (["--url", "x", "--server-options=--strict"], "there will be none"),
        (["--url", "x", "--tiny"], "leave it out"),
        (["--tiny", "--layers", "2"], "leave it out"),
        (["--kinds", "plain,nonsense"], "unknown kind nonsense"),
    ],
)
def test_options_without_effect_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(None, options)
    assert said in capsys.readouterr().err
