"""What HTTP costs: a server under many concurrent streams for minutes, against the offline API doing the same.

    python benchmarks/server_load.py [MODEL] --streams 64 --seconds 300 --speculation random --json results/load.json

Three processes beside this one: first the engine by itself, driven without HTTP; then `stride serve`, which is two.
Every stream asks for one completion after another, streamed. Reported: tokens a second over the offline API's at as
many streams, percentiles of the time to the first token and between tokens, resident memory of both server processes
over time, errors, and pages that are held when all is over. At one stream, what HTTP adds to a token.

--speculation is a drafter's name, "auto", or "random": each request one of all that can run, or none, with the seed of
the draw fixed. CPU threads are what the machine has: HTTP, the engine and this client share them.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from stridelm.bench.drive import Job, drive
from stridelm.bench.environment import environment
from stridelm.bench.figures import Percentiles
from stridelm.bench.prompts import load_prompts
from stridelm.bench.stand import encode, open_engine
from stridelm.draft import DRAFTERS
from stridelm.params import SamplingParams

OFFLINE_S = 20.0
"""About how long the offline API is timed for."""
SAMPLE_S = 5.0
WARM_SHARE = 0.2
"""Of the time, at its beginning: what memory grows by then is not held against the server."""


@dataclass(frozen=True)
class Settings:
    model: str | None
    streams: int
    seconds: float
    max_tokens: int
    temperature: float
    speculation: str
    offline: bool = False


@dataclass
class Seen:
    """What the clients saw."""

    tokens: int = 0
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    """Between events, an entry for each token that the later one brought."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = vars(parser.parse_args())
    path = args.pop("json")
    settings = Settings(**args)
    if settings.offline:
        sys.stdout.write(json.dumps(offline(settings)) + "\n")
        return 0
    alone = subprocess.run([sys.executable, *sys.argv, "--offline"], check=True, stdout=subprocess.PIPE, text=True)
    found = {"offline_tokens_per_s": json.loads(alone.stdout.splitlines()[-1]), **asyncio.run(online(settings))}
    found["over_offline"] = found["tokens_per_s"] / found["offline_tokens_per_s"]
    show(settings, found)
    if path is not None:
        record = {"benchmark": "server_load", "settings": asdict(settings), "result": found}
        path.write_text(json.dumps({**record, "environment": environment()}, indent=1) + "\n", encoding="utf-8")
    return 1 if found["errors"] or found["pages_held"] else 0


def choices(speculation: str) -> list[dict[str, Any] | str | None]:
    """What requests take turns in asking for."""
    if speculation == "random":
        return ["off", *({"drafter": name} for name in DRAFTERS if name not in ("none", "medusa", "model"))]
    return [None if speculation == "auto" else speculation]


def params_of(settings: Settings, draw: random.Random) -> dict[str, Any]:
    asked = draw.choice(choices(settings.speculation))
    shared = {"max_tokens": settings.max_tokens, "temperature": settings.temperature, "ignore_eos": True}
    return {**shared, "seed": draw.randrange(1 << 30), **({} if asked is None else {"speculation": asked})}


def offline(settings: Settings) -> float:
    """Tokens a second of the engine by itself: the second of two runs, as long as the first says that it takes."""
    engine = open_engine(settings.model, settings.streams, prefix_caching=True)
    prompts, draw = encode(engine, load_prompts()), random.Random(1)
    count, rate = 2 * settings.streams, 0.0
    default = {"speculation": "auto"} if settings.speculation == "auto" else {}
    for _ in range(2):
        jobs = [
            Job(prompts[i % len(prompts)], SamplingParams(**{**default, **params_of(settings, draw)}))
            for i in range(count)
        ]
        run = drive(engine, jobs, settings.streams)
        rate = run.tokens / run.seconds
        count = max(count, round(OFFLINE_S * rate / settings.max_tokens))
    return rate


async def online(settings: Settings) -> dict[str, Any]:
    """A server under load, from its start to its end."""
    command = [sys.executable, "-m", "stridelm.cli.main", "serve", *([settings.model] if settings.model else [])]
    command += ["--port", "0", "--max-num-seqs", str(settings.streams), "--no-access-log"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        host, port = re.findall(r"http://([^:]+):(\d+)", server.stdout.readline())[0]
        seen, memory = Seen(), asyncio.create_task(watch_memory(server.pid))
        texts, end = [prompt.text for prompt in load_prompts().prompts], time.monotonic() + settings.seconds
        began = time.monotonic()
        await asyncio.gather(*(stream(host, int(port), i, texts, end, settings, seen) for i in range(settings.streams)))
        seconds = time.monotonic() - began
        memory.cancel()
        held = await pages_held(host, int(port))
        resident = memory_of(await asyncio.gather(memory, return_exceptions=True))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return {
        "requests": seen.requests,
        "tokens": seen.tokens,
        "seconds": seconds,
        "tokens_per_s": seen.tokens / seconds,
        "errors": seen.errors[:10],
        "ttft_s": asdict(Percentiles.of(seen.first_s)),
        "itl_s": asdict(Percentiles.of(seen.between_s)),
        "resident_mib": resident,
        "resident_growth": growth(resident),
        "pages_held": held,
    }


async def stream(
    host: str, port: int, index: int, texts: list[str], end: float, settings: Settings, seen: Seen
) -> None:
    """One request after another until it is time, on one connection."""
    draw = random.Random(index)
    reader, writer = await asyncio.open_connection(host, port)
    while time.monotonic() < end:
        body = {"prompt": draw.choice(texts), "stream": True, "return_token_ids": True, **params_of(settings, draw)}
        try:
            await complete(reader, writer, json.dumps(body).encode(), seen)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            seen.errors.append(repr(error))
            return
        seen.requests += 1
    writer.close()


async def complete(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, seen: Seen) -> None:
    """One streamed completion, its events timed as they arrive. Raises ValueError for an error of the server's."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    last = time.monotonic()
    writer.write(head.encode() + b"\r\n\r\n" + body)
    status = await reader.readline()
    headers = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in status:
        raise ValueError((status + headers).decode())
    begun = False
    while True:
        size = int(await reader.readline(), 16)
        chunk = await reader.readexactly(size + 2)
        if not size:
            return
        now = time.monotonic()
        for line in chunk.splitlines():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
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


async def watch_memory(pid: int) -> list[dict[str, float]]:
    """Resident MiB of the HTTP process and of the engine's, every so often until it is cancelled."""
    seen: list[dict[str, float]] = []
    http = psutil.Process(pid)
    try:
        while True:
            [engine] = http.children()
            both = {"http": http, "engine": engine}
            seen.append({name: process.memory_info().rss / 2**20 for name, process in both.items()})
            await asyncio.sleep(SAMPLE_S)
    except asyncio.CancelledError:
        return seen


def memory_of(gathered: list[Any]) -> list[dict[str, float]]:
    [seen] = gathered
    assert isinstance(seen, list), seen
    return seen


def growth(resident: list[dict[str, float]]) -> dict[str, float]:
    """Of each process, by which share it grew after the warm-up."""
    warm = resident[min(round(WARM_SHARE * len(resident)), len(resident) - 1)]
    return {name: resident[-1][name] / warm[name] - 1 for name in warm}


async def pages_held(host: str, port: int) -> float:
    """When nothing runs any more."""
    await asyncio.sleep(1.0)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return sum(float(value) for value in re.findall(r'^stride_kv_pages\{[^}]*state="held"[^}]*\} (\S+)', text, re.M))


def show(settings: Settings, found: dict[str, Any]) -> None:
    title = f"{settings.streams} streams, {settings.seconds:g} s, {settings.max_tokens} tokens, {settings.speculation}"
    table = Table("", "", title=title, title_justify="left")
    ms = {name: " / ".join(f"{1000 * v:.1f}" for v in found[name].values()) for name in ("ttft_s", "itl_s")}
    rows = {
        "offline, tokens/s": f"{found['offline_tokens_per_s']:,.0f}",
        "served, tokens/s": f"{found['tokens_per_s']:,.0f} ({found['over_offline']:.0%})",
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
