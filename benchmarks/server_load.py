"""What HTTP costs: a server under many concurrent streams for minutes, against the offline API doing the same.

    python benchmarks/server_load.py [MODEL] --streams 64 --seconds 300 --speculation random --json results/load.jsonl

Three processes beside this one: `stride serve`, which is two, and the engine alone, driven without HTTP. The latter is
timed before and after the server, because machines drift; --turns makes them alternate more often. Every stream
requests one streamed completion after another, and the same ones offline. Reported: tokens per second over the offline
API's at as many streams, the same for the time per token after the first, percentiles of the time to the first token
and between tokens, resident memory of both server processes over time, errors, and pages still held at the end.

--speculation is a drafter's name, "auto", or "random": each request uses one of all that can run, or none, drawn with a
fixed seed. CPU threads are not limited: HTTP, the engine and this client share them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from stridelm.bench.drive import Job, Run, drive
from stridelm.bench.http.answer import Answer
from stridelm.bench.http.connection import Connection, post
from stridelm.bench.metrics import Percentiles
from stridelm.bench.prompts import load_prompts
from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.bench.stand import open_engine
from stridelm.draft import DRAFTERS
from stridelm.params import SamplingParams

OFFLINE_S = 20.0
"""About the maximum time for which the offline API is timed in each of its turns."""
SAMPLE_S = 5.0


@dataclass(frozen=True)
class Settings:
    model: str | None
    streams: int
    seconds: float
    max_tokens: int
    temperature: float
    speculation: str
    turns: int
    offline: bool = False

    @property
    def turn_s(self) -> float:
        return self.seconds / self.turns


@dataclass
class Seen:
    """What the clients observed."""

    tokens: int = 0
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    """Time between events per token, with one entry for each token of the later event."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--speculation", default="auto")
    parser.add_argument(
        "--turns", type=int, default=1, help="parts of the time, with the offline API timed between them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = vars(parser.parse_args())
    path = args.pop("json")
    settings = Settings(**args)
    if settings.offline:
        offline(settings)
        return 0
    found = asyncio.run(online(settings))
    for name in ("tokens_per_s", "token_s"):
        found[f"{name}_over_offline"] = found[name] / mean(run[name] for run in found["offline"])
    show(settings, found)
    if path is not None:
        append_result(path, "server_load", settings, result=found)
    return 1 if found["errors"] or found["pages_held"] else 0


def choices(speculation: str) -> list[dict[str, Any] | str | None]:
    """The `speculation` values among which each request draws."""
    if speculation == "random":
        return ["off", *({"drafter": name} for name in DRAFTERS if name not in ("none", "medusa", "model"))]
    return [None if speculation == "auto" else speculation]


def asks(settings: Settings, turn: int, index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The requests of one stream in one turn, one after another: a prompt and its sampling parameters."""
    texts, draw = [prompt.text for prompt in load_prompts().prompts], random.Random(turn * settings.streams + index)
    shared = {"max_tokens": settings.max_tokens, "temperature": settings.temperature, "ignore_eos": True}
    while True:
        choice = draw.choice(choices(settings.speculation))
        speculation = {} if choice is None else {"speculation": choice}
        yield draw.choice(texts), {**shared, "seed": draw.randrange(1 << 30), **speculation}


def offline(settings: Settings) -> None:
    """The engine alone, in its own process: each line of input is the number of a turn, each line of output its
    figures. A turn runs as many requests as fit into its time at the speed of the previous turn."""
    engine = open_engine(settings.model, settings.streams, prefix_caching=True)
    assert engine.tokenizer is not None
    default = {"speculation": "auto"} if settings.speculation == "auto" else {}
    each = 2
    for line in chain(["0"], iter(sys.stdin.readline, "")):  # the first turn warms up
        streams = [asks(settings, int(line), index) for index in range(settings.streams)]
        requests = [next(stream) for _ in range(each) for stream in streams]
        jobs = [
            Job(engine.tokenizer.encode(text), SamplingParams(**{**default, **options})) for text, options in requests
        ]
        run = drive(engine, jobs, settings.streams)
        seconds = min(OFFLINE_S, settings.turn_s)
        each = max(2, round(seconds * run.tokens_per_s / settings.max_tokens / settings.streams))
        sys.stdout.write(json.dumps({"tokens_per_s": run.tokens_per_s, "token_s": behind_the_first(run)}) + "\n")
        sys.stdout.flush()


class Offline:
    """The parent's side of the `offline` process."""

    def __init__(self) -> None:
        command = [sys.executable, *sys.argv, "--offline"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._figures()

    def turn(self, number: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return self._figures()

    def end(self) -> None:
        self._process.communicate("")

    def _figures(self) -> dict[str, float]:
        assert self._process.stdout is not None
        figures: dict[str, float] = json.loads(self._process.stdout.readline())
        return figures


def behind_the_first(run: Run) -> float:
    """Mean seconds per token after each request's first emission."""
    emissions = [timeline.emissions for timeline in run.timelines]
    return sum(e[-1][0] - e[0][0] for e in emissions) / sum(count for e in emissions for _, count in e[1:])


async def online(settings: Settings) -> dict[str, Any]:
    """A server under load, from its start to its end."""
    command = [sys.executable, "-m", "stridelm.cli.main", "serve", *([settings.model] if settings.model else [])]
    command += ["--port", "0", "--max-num-seqs", str(settings.streams), "--no-access-log"]
    alone, server = Offline(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        host, port = re.findall(r"http://([^:]+):(\d+)", server.stdout.readline())[0]
        seen, resident = Seen(), list[dict[str, float]]()
        turns, seconds = [await asyncio.to_thread(alone.turn, 0)], 0.0
        for turn in range(settings.turns):
            watching = asyncio.create_task(watch_memory(server.pid, resident))
            began = time.monotonic()
            end = began + settings.turn_s
            streams = (asks(settings, turn, index) for index in range(settings.streams))
            await asyncio.gather(*(stream(host, int(port), asked, end, seen) for asked in streams))
            seconds += time.monotonic() - began
            watching.cancel()
            turns.append(await asyncio.to_thread(alone.turn, turn))
        held = await pages_held(host, int(port))
    finally:
        alone.end()
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return {
        "offline": turns,
        "requests": seen.requests,
        "tokens": seen.tokens,
        "seconds": seconds,
        "tokens_per_s": seen.tokens / seconds,
        "token_s": mean(seen.between_s),
        "errors": seen.errors[:10],
        "ttft_s": asdict(Percentiles.of(seen.first_s)),
        "itl_s": asdict(Percentiles.of(seen.between_s)),
        "resident_mib": {name: extent([both[name] for both in resident]) for name in resident[0]},
        "resident_growth": growth(resident),
        "pages_held": held,
    }


async def stream(host: str, port: int, asked: Iterator[tuple[str, dict[str, Any]]], end: float, seen: Seen) -> None:
    """Send one request after another on one connection until `end`."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    while time.monotonic() < end:
        text, options = next(asked)
        body = {"prompt": text, "stream": True, "return_token_ids": True, **options}
        message = post(f"{host}:{port}", "/v1/completions", json.dumps(body).encode())
        try:
            take(await connection.send(message), seen)
        except (OSError, ValueError) as error:
            seen.errors.append(repr(error))
            return
        seen.requests += 1
    connection.transport.close()


def take(answer: Answer, seen: Seen) -> None:
    """One streamed completion. Raises ValueError for an error from the server."""
    last, begun = answer.sent, False
    for now, event in answer.events():
        if "error" in event:
            raise ValueError(event["error"]["message"])
        count = len(event["choices"][0]["token_ids"])
        seen.tokens += count
        if begun:
            seen.between_s += [(now - last) / count] * count if count else []
        elif count:
            begun = True
            seen.first_s.append(now - last)
        if count:
            last = now


async def watch_memory(pid: int, seen: list[dict[str, float]]) -> None:
    """Record resident MiB of the HTTP process and of the engine's, every SAMPLE_S seconds until cancelled."""
    http = psutil.Process(pid)
    while True:
        [engine] = http.children()
        both = {"http": http, "engine": engine}
        seen.append({name: process.memory_info().rss / 2**20 for name, process in both.items()})
        await asyncio.sleep(SAMPLE_S)


def growth(resident: list[dict[str, float]]) -> dict[str, float]:
    """By what share each process grew after the warm-up: the maximum in the last fifth of the time over that in the
    second fifth, because the engine gives memory back now and then."""
    fifth = max(1, len(resident) // 5)
    second, last = resident[fifth : 2 * fifth] or resident, resident[-fifth:]
    return {name: max(seen[name] for seen in last) / max(seen[name] for seen in second) - 1 for name in resident[0]}


def extent(resident: list[float]) -> dict[str, float]:
    """A summary of a process's samples, in MiB: first, maximum and last."""
    return {"first": resident[0], "most": max(resident), "last": resident[-1]}


async def pages_held(host: str, port: int) -> float:
    """Pages held once no request is running."""
    await asyncio.sleep(1.0)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return sum(float(value) for value in re.findall(r'^stride_kv_pages\{[^}]*state="held"[^}]*\} (\S+)', text, re.M))


def show(settings: Settings, found: dict[str, Any]) -> None:
    title = f"{settings.streams} streams, {settings.seconds:g} s, {settings.max_tokens} tokens, {settings.speculation}"
    table = Table("", "", title=title, title_justify="left")
    ms = {name: " / ".join(f"{1000 * v:.1f}" for v in found[name].values()) for name in ("ttft_s", "itl_s")}
    rows = {
        "offline, tokens/s, each turn": " / ".join(f"{run['tokens_per_s']:,.0f}" for run in found["offline"]),
        "served, tokens/s": f"{found['tokens_per_s']:,.0f} ({found['tokens_per_s_over_offline']:.1%})",
        "offline, ms/token": " / ".join(f"{1000 * run['token_s']:.2f}" for run in found["offline"]),
        "served, ms/token": f"{1000 * found['token_s']:.2f} ({found['token_s_over_offline'] - 1:+.1%})",
        "requests, errors": f"{found['requests']:,}, {len(found['errors'])}",
        "TTFT, p50 / p90 / p99 ms": ms["ttft_s"],
        "ITL, p50 / p90 / p99 ms": ms["itl_s"],
        "resident growth": ", ".join(f"{name} {share:+.1%}" for name, share in found["resident_growth"].items()),
        "pages held at the end": f"{found['pages_held']:g}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    for error in found["errors"]:
        Console().print(error, markup=False)


if __name__ == "__main__":
    sys.exit(main())
