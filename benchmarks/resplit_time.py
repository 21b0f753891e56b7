"""How long a re-split takes: memory that moves between page groups while requests run, as traffic changes.

    python benchmarks/resplit_time.py --json results/h100.jsonl
    python benchmarks/resplit_time.py --tiny --memory 0.001

Random weights in the shape of a Gemma 4, random prompts, plain decoding, no prefix cache. Waves of requests follow each
other in one engine, each more than its memory holds at once: short contexts, long ones, short ones again. A re-split's
time is the host's, from when no step is in flight until the next one can be planned; what the requests wait for is that
and the step that it could not overlap. `share` is all of them over the wave's time. --tiny is a small shape on a CPU,
with shorter contexts; how little memory makes pages move depends on the machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from gemma_shapes import SHARING
from rich.console import Console
from rich.table import Table
from shared_prefill import device_name, open_engine

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams

GIB = 2**30


WAVES = {False: ("2048,32768,2048", "256,16,256", 32), True: ("200,2000,200", "40,4,40", 8)}
"""Tiny or not: prompt tokens and requests of each wave, and output tokens."""


@dataclass(frozen=True)
class Settings:
    model: str
    lengths: tuple[int, ...]
    requests: tuple[int, ...]
    output: int
    memory: float
    """The share of free memory that KV takes."""
    tiny: bool


@dataclass(frozen=True)
class Row:
    context: int
    requests: int
    seconds: float
    resplits: int
    median_ms: float
    longest_ms: float
    moved_gib: float
    share: float


@dataclass
class Watched:
    """The re-splits of an engine since the last `clear`."""

    engine: Engine
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0

    def __post_init__(self) -> None:
        self.apply = self.engine.resplit.apply
        self.engine.resplit.apply = self  # type: ignore[method-assign]

    def __call__(self, totals: Mapping[str, int]) -> None:
        pool = self.engine.loaded.pool
        before = {group: pool.bytes_at({group: pages}) for group, pages in pool.pages.items()}
        began = time.perf_counter()
        self.apply(totals)
        self.seconds.append(time.perf_counter() - began)
        self.bytes += sum(max(0, pool.bytes_at({group: pool.pages[group]}) - size) for group, size in before.items())

    def clear(self) -> None:
        self.seconds, self.bytes = [], 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHARING, default=SHARING[-1], help="whose shape")
    parser.add_argument("--lengths", help=f"prompt tokens of each wave (default: {WAVES[False][0]})")
    parser.add_argument("--requests", help=f"requests of each wave (default: {WAVES[False][1]})")
    parser.add_argument("--output", type=int, help=f"output tokens (default: {WAVES[False][2]})")
    parser.add_argument("--memory", type=float, default=0.2, help="share of free memory that KV takes")
    parser.add_argument("--tiny", action="store_true", help="a small shape on a CPU, in float32")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    texts = (args.lengths or WAVES[args.tiny][0], args.requests or WAVES[args.tiny][1])
    lengths, requests = (tuple(map(int, text.split(","))) for text in texts)
    if len(lengths) != len(requests):
        parser.error(f"{len(lengths)} lengths and {len(requests)} counts of requests: give one of each for every wave")
    if not args.tiny and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: give --tiny for a small shape on a CPU")
    settings = Settings(args.model, lengths, requests, args.output or WAVES[args.tiny][2], args.memory, args.tiny)
    shape, engine = open_engine(
        args.model,
        settings.tiny,
        max_num_seqs=max(requests),
        max_num_batched_tokens=8192,
        max_model_len=131072,
        kv_memory_fraction=settings.memory,
    )
    pool = engine.loaded.pool
    if pool.most is None:
        parser.error("all that is of use fits in this memory, so that none needs to move: give a smaller --memory")
    title = f"{shape.title}, {pool.budget / GIB:.2f} GiB of KV, {device_name()}, torch {torch.__version__}"
    watched = Watched(engine)
    rows = [wave(watched, *each, settings.output) for each in zip(lengths, requests, strict=True)]
    columns = "context", "requests", "seconds", "re-splits", "median ms", "longest ms", "moved GiB", "share"
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.context:,}",
            str(row.requests),
            f"{row.seconds:.2f}",
            str(row.resplits),
            f"{row.median_ms:.2f}",
            f"{row.longest_ms:.2f}",
            f"{row.moved_gib:.2f}",
            f"{row.share:.2%}",
        )
    Console(width=120).print(table)
    if args.json:
        append_result(args.json, "resplit_time", settings, kv_bytes=pool.budget, rows=[asdict(row) for row in rows])


def wave(watched: Watched, length: int, count: int, output: int) -> Row:
    engine, rng = watched.engine, random.Random(length)
    vocab = engine.loaded.target.vocab_size
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    watched.clear()
    for index in range(count):
        engine.add(f"{time.perf_counter_ns()}-{index}", [rng.randrange(vocab) for _ in range(length)], params)
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    engine.check()
    ms = [1e3 * seconds for seconds in watched.seconds] or [0.0]
    share = sum(watched.seconds) / took
    times = statistics.median(ms), max(ms), watched.bytes / GIB
    return Row(length, count, took, len(watched.seconds), *times, share)


if __name__ == "__main__":
    main()
