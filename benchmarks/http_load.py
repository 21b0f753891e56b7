"""A closed loop over HTTP: what streams meet at a server, beside other servers and the engine without one.

    python benchmarks/http_load.py --json results/http_load.jsonl --plot http_load.svg
    python benchmarks/http_load.py --url http://127.0.0.1:8000 --url http://127.0.0.1:8001
    python benchmarks/http_load.py --tiny --streams 2,4 --kind-streams 4 --warm-up 2 --seconds 5

Each stream sends its next request when the last has ended: prompts of 128 to 512 random token ids, outputs of 128 to
384 tokens, all lengths equally likely, greedy, streamed, ignoring ends of text; the same list for every server. The
clients are processes of at most 64 streams that parse nothing meanwhile; `client` is the share of the time for which
the busiest of them computed. Only a window after the warm-up counts. An event has the tokens of one step, or of several
if the server merged them; a token's time divides those between two events by the mean number of tokens per event.

Without --url, `stride serve` is started on a checkpoint with Llama-3.1-8B's shape and random weights, or on the
built-in model (--tiny), and before it live_load.py runs the same closed loop in process: the base of `/in process`.
Where vLLM is installed, it then serves the same checkpoint. It is found as `vllm` on the path, or named by --vllm.

With --kind-streams streams, requests of other kinds follow, as ratios to plain ones: with a JSON schema (outputs may
end when the object does), penalties, log-probabilities of five tokens, and with several drafters at once, which
Stride's requests name in turn; acceptance is simulated, since random weights would accept next to nothing. --url's
servers are sent those too; what a server refuses is reported as an error. They should not cache prefixes, as those
started here do not: all loads send the same prompts.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from http_client import Job
from http_options import Settings, read_options
from http_servers import started, stride_command, vllm_command
from live_load import CLOSED
from load_model import engine_options
from load_report import as_table, plot
from load_times import Exchange, Times
from rich.console import Console

from stridelm.bench.http.server import Server
from stridelm.bench.results import append_result, read_results
from stridelm.builtin import builtin_path

STREAMS_PER_CLIENT = 64
HERE = Path(__file__).parent
IN_PROCESS = "in process"
START_S = 0.5
"""Until all clients have read when to begin."""
DEAD = "a client process died; its error is above"
ERRORS = 20
"""How many are shown and kept."""


@dataclass(frozen=True)
class Row(Times):
    name: str
    load: str
    kind: str
    streams: int
    requests: int
    errors: int
    client_busy: float | None
    over_in_process: float | None
    over_plain: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(__doc__, arguments)
    settings = options.settings
    console = Console(width=170, highlight=False)
    if settings.serve and not settings.tiny and not torch.cuda.is_available():
        console.print("an 8B model needs a GPU, and torch sees no CUDA device here; --tiny or --url does without")
        return 1
    rows: list[Row] = []
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        if settings.in_process:
            rows += in_process(Path(folder), settings)
        drafters = settings.drafters if "drafters" in settings.kinds else ()
        engine = engine_options(Path(folder), drafters, settings.layers, tiny=settings.tiny) if settings.serve else {}
        for name in (*(["url"] if settings.url else []), *settings.serve):
            with serving(name, Path(folder), engine, settings) as servers:
                for (kind, streams), server in itertools.product(settings.loads(name), servers):
                    row, faults = measure(server, kind, streams, rows, settings)
                    console.print(f"{row.name}, {row.load}: {row.tokens_per_s:,.0f} tokens/s")
                    errors += [f"{row.name}, {row.load}: {fault}" for fault in faults]
                    rows.append(row)
    show(rows, console)
    for error in errors[:ERRORS]:
        console.print(error[:500], markup=False)
    if options.json:
        append_result(options.json, "http_load", settings, rows=[asdict(row) for row in rows], errors=errors[:ERRORS])
    if options.plot:
        plot([row for row in rows if row.kind == "plain"], options.plot)
    return 1 if errors else 0


def in_process(folder: Path, settings: Settings) -> list[Row]:
    """The closed loop without HTTP, in a process of its own, which gives the device back."""
    results = folder / "live_load.jsonl"
    command = [sys.executable, str(HERE / "live_load.py"), "--decoding", "plain", "--json", str(results)]
    plain = [streams for kind, streams in settings.loads("stride") if kind == "plain"]
    command += ["--loads", ",".join(f"{CLOSED}{streams}" for streams in plain)]
    command += ["--seconds", str(settings.seconds), "--warm-up", str(settings.warm_up)]
    command += ["--max-num-seqs", str(settings.max_num_seqs)]
    command += ["--tiny"] if settings.tiny else ["--layers", str(settings.layers)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [run] = read_results(results)
    times = [field.name for field in fields(Times)]
    return [
        Row(
            **{name: row[name] for name in times},
            name=IN_PROCESS,
            load=row["load"].removeprefix(CLOSED),
            kind="plain",
            streams=int(row["load"].removeprefix(CLOSED)),
            requests=row["requests"],
            errors=0,
            client_busy=None,
            over_in_process=None,
            over_plain=None,
        )
        for row in run["rows"]
    ]


@contextmanager
def serving(name: str, folder: Path, engine: dict[str, Any], settings: Settings) -> Iterator[list[Server]]:
    """The servers that a name stands for, which respond within the context."""
    if name == "url":
        yield [Server.at(url) for url in settings.url]
        return
    if name == "stride":
        simulated = "drafters" in settings.kinds and any("synthetic" in drafter for drafter in settings.drafters)
        options = settings.server_options + " --enable-synthetic-acceptance" * simulated
        command = stride_command(engine, settings.max_num_seqs, options)
    else:
        assert settings.vllm is not None
        checkpoint = engine if "model" in engine else {**engine, "model": str(builtin_path())}
        command = vllm_command(settings.vllm, checkpoint, settings.max_num_seqs, settings.vllm_options)
    with started(name, command, folder / f"{name}.log") as server:
        yield [server]


def measure(
    server: Server, kind: str, streams: int, before: Sequence[Row], settings: Settings
) -> tuple[Row, list[str]]:
    """One load, from its first request to its last token, and the errors in it."""
    job = Job(server.host, server.port, server.path("/v1/completions"), server.model, kind, settings.drafters, streams)
    begin, reports = run_clients(job, settings)
    window = begin + settings.warm_up, begin + settings.warm_up + settings.seconds
    streamed = [each for report in reports for each in report["streamed"]]
    exchanges = [
        Exchange(each["sent"], each["at"], [each["tokens"] / len(each["at"])] * len(each["at"])) for each in streamed
    ]
    errors = [error for report in reports for error in report["errors"]]
    times = Times.of(exchanges, *window)
    plain = [row for row in before if row.kind == "plain" and row.streams == streams]
    over = {row.name: times.tokens_per_s / row.tokens_per_s for row in plain if row.tokens_per_s}
    row = Row(
        **asdict(times),
        name=server.name,
        load=str(streams) if kind == "plain" else f"{streams}, {kind}",
        kind=kind,
        streams=streams,
        requests=len(streamed),
        errors=len(errors),
        client_busy=max(report["busy"] for report in reports),
        over_in_process=over.get(IN_PROCESS) if kind == "plain" else None,
        over_plain=over.get(server.name) if kind != "plain" else None,
    )
    return row, errors


def run_clients(job: Job, settings: Settings) -> tuple[float, list[dict[str, Any]]]:
    """When the load began, and the report of each client process (http_client.Report)."""
    command = [sys.executable, str(HERE / "http_client.py")]
    numbers = range(job.streams)
    shares = [numbers[first : first + STREAMS_PER_CLIENT] for first in numbers[::STREAMS_PER_CLIENT]]
    clients = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in shares]
    try:
        for client, mine in zip(clients, shares):
            tell(client, {**asdict(job), "mine": list(mine), "ramp_s": settings.warm_up / 2})
        for client in clients:
            assert client.stdout is not None
            if not client.stdout.readline():
                raise RuntimeError(DEAD)
        begin = time.monotonic() + START_S
        for client in clients:
            tell(client, (begin, begin + settings.warm_up + settings.seconds))
        with ThreadPoolExecutor(len(clients)) as readers:
            reports = list(readers.map(lambda client: client.communicate()[0], clients))
    finally:
        for client in clients:
            client.kill()
            client.wait()
    if not all(reports):
        raise RuntimeError(DEAD)
    return begin, [json.loads(report) for report in reports]


def tell(client: subprocess.Popen[str], value: Any) -> None:
    assert client.stdin is not None
    client.stdin.write(json.dumps(value) + "\n")
    client.stdin.flush()


def show(rows: Sequence[Row], console: Console) -> None:
    def ratios(values: Iterable[float | None]) -> list[str]:
        return ["" if value is None else f"{value:.2f}x" for value in values]

    more = {
        "/in process": ratios(row.over_in_process for row in rows),
        "/plain": ratios(row.over_plain for row in rows),
        "errors": [str(row.errors) for row in rows],
        "client": ["" if row.client_busy is None else f"{row.client_busy:.0%}" for row in rows],
    }
    console.print(as_table(rows, more))


if __name__ == "__main__":
    raise SystemExit(main())
