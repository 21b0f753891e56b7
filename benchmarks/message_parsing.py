"""What it costs a server to find reasoning and tool calls in chat streams: the same load with and without, by turns.

    python benchmarks/message_parsing.py --streams 64 --rounds 3
    python benchmarks/message_parsing.py --shape llama-3.1-8b --tokens 400  # on a GPU

A server of the built-in model, of --model, or of a --shape with random weights; each stream gets --tokens tokens at
temperature 1. Reported for each: tokens per second, and processor time of the HTTP process per thousand tokens, as
medians over the rounds. `plain` leaves everything in the content, `reasoning` looks for that, `tools` also for calls.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx
import psutil
from http_servers import started
from load_model import write_model
from model_shapes import SHAPES

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ tools }}<tool_call> arguments <think>\n"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
KINDS: dict[str, dict[str, Any]] = {"plain": {"separate_reasoning": False}, "reasoning": {}, "tools": {"tools": [TOOL]}}


async def load(url: str, streams: int, body: dict[str, Any]) -> int:
    """Events of all streams, which begin at once."""
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(seed: int) -> int:
            async with client.stream("POST", "/v1/chat/completions", json={**body, "seed": seed}) as answer:
                answer.raise_for_status()
                return sum([1 async for _ in answer.aiter_lines()])

        return sum(await asyncio.gather(*map(one, range(streams))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    body = {"messages": [{"role": "user", "content": "def f(x):"}], "stream": True, "temperature": 1}
    body |= {"max_tokens": args.tokens, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as directory:
        template = Path(directory) / "chat.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        command = [sys.executable, "-m", "stridelm.cli.main", "serve"]
        if args.shape:
            layers = SHAPES[args.shape].config["num_hidden_layers"]
            options = write_model(Path(directory), ["plain"], layers, SHAPES[args.shape])
            command += [options.pop("model"), "--drafter", "none", "--max-model-len", "8192"]
            command += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        elif args.model:
            command.append(args.model)
        command += ["--chat-template", str(template), "--no-access-log", "--max-num-seqs", str(args.streams)]
        command += ["--api-server-count", "1"]
        with started("stride", command, Path(directory) / "log") as server:
            [process] = [one.pid for one in psutil.process_iter() if str(template) in one.cmdline()]
            figures = measure(f"http://{server.host}:{server.port}", process, args.streams, args.rounds, body)
    tokens = args.streams * args.tokens
    result = {
        kind: {
            "tokens_per_s": round(tokens / median(seconds for seconds, _ in found)),
            "http_ms_per_1000_tokens": round(1e6 * median(used for _, used in found) / tokens, 1),
        }
        for kind, found in figures.items()
    }
    for kind, line in result.items():
        sys.stdout.write(
            f"{kind:10}{line['tokens_per_s']:8} tokens/s, {line['http_ms_per_1000_tokens']} ms per 1,000\n"
        )
    sys.stdout.write(json.dumps({"streams": args.streams, "tokens": args.tokens, **result}) + "\n")
    return 0


def measure(
    url: str, pid: int, streams: int, rounds: int, body: dict[str, Any]
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each round, and the HTTP process's. A round of each kind before does not count."""
    process = psutil.Process(pid)
    figures: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, more in KINDS.items():
            before, began = process.cpu_times(), time.perf_counter()
            asyncio.run(load(url, streams, {**body, **more}))
            took, after = time.perf_counter() - began, process.cpu_times()
            if number:
                figures[kind].append((took, after.user + after.system - before.user - before.system))
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
