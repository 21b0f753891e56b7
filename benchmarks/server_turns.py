"""Two checkouts of Stride that serve in turns: how much a change costs under load, over HTTP.

    python benchmarks/server_turns.py ../before . --streams 64 --seconds 10 --turns 8

Each checkout serves the built-in model from its own `src` with this Python, and sleeps while the other is under load,
so that whatever else the machine does affects both. Every stream requests one streamed greedy completion of 128 tokens
after another. Reported: tokens per second of each, the ratio turn by turn, and processor time per token of the HTTP
process and of the engine's. A checkout may set environment variables of its server: `.:GOMP_SPINCOUNT=3000`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from statistics import median

import psutil
from rich.console import Console

from stridelm.bench.http.connection import Connection, post

PROMPTS = ("def fibonacci(n):\n", "class Stack:\n    def __init__(self):\n", "import os\n\n\ndef walk(path):\n")
TOKENS = 128
WARM_UP_S = 6.0


def started(name: str, *options: str) -> tuple[subprocess.Popen[str], tuple[str, int]]:
    """A checkout's server, which serves at the address. name: the checkout, and variables as above."""
    tree, *variables = name.split(":")
    environment = {**os.environ, **dict(variable.split("=", 1) for variable in variables)}
    environment["PYTHONPATH"] = os.path.join(os.path.abspath(tree), "src")
    command = [sys.executable, "-m", "stridelm.cli.main", "serve", *options, "--port", "0", "--no-access-log"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://([\d.]+):(\d+)", line)
    if found is None:
        process.kill()
        process.wait()
        raise RuntimeError(f"{name} did not start: {line!r}")
    return process, (found[1], int(found[2]))


@dataclass
class Server:
    """One checkout's server and its measurements."""

    name: str
    rates: list[float] = field(default_factory=list)
    micros: list[tuple[float, ...]] = field(default_factory=list)
    """Processor time per token: HTTP, engine."""

    def start(self, streams: int) -> None:
        self.process, self.address = started(self.name, "--max-num-seqs", str(streams), "--max-model-len", "1024")
        server = psutil.Process(self.process.pid)
        engine = next(child for child in server.children() if "stridelm.server.engine_process" in child.cmdline())
        self.processes = (server, engine)

    async def load(self, streams: int, seconds: float) -> float:
        """Tokens per second with `streams` streams."""
        before, began = self._seconds(), time.monotonic()
        done = sum(await asyncio.gather(*(self._stream(n, began + seconds) for n in range(streams))))
        tokens = done * TOKENS
        spent = (1e6 * (after - was) / tokens for was, after in zip(before, self._seconds(), strict=True))
        self.micros.append(tuple(spent))
        return tokens / (time.monotonic() - began)

    async def _stream(self, number: int, until: float) -> int:
        """Number of completions that one stream received."""
        host, port = self.address
        _, connection = await asyncio.get_running_loop().create_connection(Connection, host, int(port))
        done = 0
        while time.monotonic() < until:
            prompt = PROMPTS[(number + done) % len(PROMPTS)]
            asked = {"model": "built-in", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS}
            body = json.dumps({**asked, "ignore_eos": True, "stream": True}).encode()
            await connection.send(post(f"{host}:{port}", "/v1/completions", body))
            done += 1
        connection.transport.close()
        return done

    def _seconds(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self.processes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    servers = [Server(name) for name in args.checkouts]
    console = Console(soft_wrap=True, highlight=False)
    try:
        for server in servers:
            server.start(args.streams)
            asyncio.run(server.load(args.streams, WARM_UP_S))
            server.micros.clear()
        for turn in range(args.turns):
            for server in servers if turn % 2 == 0 else servers[::-1]:
                server.rates.append(asyncio.run(server.load(args.streams, args.seconds)))
            console.print(f"turn {turn}: " + ", ".join(f"{server.rates[-1]:.0f} tokens/s" for server in servers))
    finally:
        for server in servers:
            if hasattr(server, "process"):
                server.process.terminate()
                server.process.wait()
    for server in servers:
        http, engine = (median(part) for part in zip(*server.micros, strict=True))
        console.print(f"{server.name}: {median(server.rates):.0f} tokens/s, {http:.1f} us HTTP, {engine:.1f} us engine")
    ratios = [second / first for first, second in zip(*(server.rates for server in servers), strict=True)]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    console.print(f"the second over the first: {median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
