"""How long a decoder's row operations take on a GPU, in Triton and in plain torch.

    python benchmarks/gpu_row_kernels.py --json results/gpu_row_kernels.jsonl

Shapes of an 8B model in bfloat16: hidden width 4,096, MLP width 14,336, 32 query and 8 KV heads of size 128, and for
`compact` a cache of 32 layers; for `part_logits` the head of a Gemma 4 assistant, 32 of 2,048 centroids with 128 tokens
each of 256 numbers. Every figure is the median over replays of a CUDA graph of many calls, divided by their
number, so that launches from the host cost nothing. Each call has its own inputs and outputs: with many rows they come
from memory, with few rows from the L2 cache, as in a decoding step.

GB/s counts every byte that must be read or written once. `plain` is the torch implementation, several kernels per
operation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import graph_us

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.kernels.ops import Ops, QKRope
from stridelm.kernels.plain import PlainOps
from stridelm.models.layers.rope import Rope, RopeSpec

ROWS = (1, 16, 64, 256, 2048)
CALLS = 50
"""Calls in a graph."""
WIDTH, MLP, HEADS, KV_HEADS, SIZE, LAYERS = 4096, 14336, 32, 8, 128, 32
ITEM = 2
"""Bytes of a bfloat16."""
SLOTS = 1 << 15
POSITIONS = 8192
EPS = 1e-5
ASSISTANT, CENTROIDS, BEST, TOKENS = 256, 2048, 32, 128
"""An assistant's width, its centroids, how many a row chooses, and tokens of each."""
DRAFTING = 256
"""Maximum rows for which there are logits: one for each request."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One operation at one number of rows: the same work done by both sets, on `CALLS` different inputs."""

    name: str
    rows: int
    moved: int
    """Bytes that a call must read and write."""
    triton: list[Call]
    plain: list[Call]


@dataclass(frozen=True)
class Settings:
    rows: tuple[int, ...] = ROWS
    replays: int = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    if not torch.cuda.is_available():
        console.print("benchmarks/gpu_row_kernels.py times kernels on a GPU, and torch sees no CUDA device here")
        return 1
    settings = Settings()
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    table, found = rows_section(settings.rows, settings.replays)
    console.print(table)
    if args.json:
        append_result(args.json, "gpu_row_kernels", settings, rows=found)
    return 0


def rows_section(rows: tuple[int, ...] = ROWS, replays: int = 5) -> tuple[Table, list[dict[str, Any]]]:
    """Times all operations: a table for the terminal, and for JSON one row per operation and number of rows."""
    table = Table(box=None, pad_edge=False, title="row operations")
    for column in ("operation", "rows", "us", "GB/s", "plain us", "plain / triton"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    found = []
    for case in cases(rows):
        us, plain_us = graph_us(case.triton, replays), graph_us(case.plain, replays)
        gb_per_s = case.moved / us / 1000
        found.append({"operation": case.name, "rows": case.rows, "us": us, "gb_per_s": gb_per_s, "plain_us": plain_us})
        table.add_row(
            case.name, str(case.rows), f"{us:.2f}", f"{gb_per_s:.0f}", f"{plain_us:.2f}", f"{plain_us / us:.1f}x"
        )
    return table, found


def cases(rows: tuple[int, ...]) -> Iterator[Case]:
    """Yields the cases one at a time, because their tensors take gigabytes."""
    for make in (norm, add_norm, add_normed, gate, rope_and_store, compact):
        for count in rows:
            yield make(count)
    for count in rows:
        if count <= DRAFTING:
            yield part_logits(count)


def both(run: Callable[[Ops, int], object]) -> dict[str, list[Call]]:
    """`run(ops, n)` for each input n, with either set of operations."""
    from stridelm.kernels.triton_rows import TritonOps

    sets: dict[str, Ops] = {"triton": TritonOps(), "plain": PlainOps()}
    return {name: [partial(run, ops, n) for n in range(CALLS)] for name, ops in sets.items()}


def noise(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def norm(rows: int) -> Case:
    x, weight = noise(CALLS, rows, WIDTH), noise(WIDTH)
    calls = both(lambda ops, n: ops.norm(x[n], weight, EPS))
    return Case("norm", rows, (2 * rows + 1) * WIDTH * ITEM, **calls)


def add_norm(rows: int) -> Case:
    (x, delta), weight = noise(2, CALLS, rows, WIDTH), noise(WIDTH)
    calls = both(lambda ops, n: ops.add_norm(x[n], delta[n], weight, EPS))
    return Case("add_norm", rows, (4 * rows + 1) * WIDTH * ITEM, **calls)


def add_normed(rows: int) -> Case:
    """The end of a layer with norms on both sides and a factor, and the next layer's norm."""
    (x, delta), (after, weight), factor = noise(2, CALLS, rows, WIDTH), noise(2, WIDTH), noise(1)
    calls = both(lambda ops, n: ops.add_normed(x[n], delta[n], after, EPS, factor, weight))
    return Case("add_normed", rows, (4 * rows + 2) * WIDTH * ITEM, **calls)


def gate(rows: int) -> Case:
    gate_up = noise(CALLS, rows, 2 * MLP)
    return Case("gate", rows, 3 * rows * MLP * ITEM, **both(lambda ops, n: ops.gate(gate_up[n])))


def rope_and_store(rows: int) -> Case:
    rope = Rope(RopeSpec(SIZE, 500000.0), POSITIONS)
    rope.prepare("cuda")
    positions = torch.randint(0, POSITIONS, (CALLS, rows), device="cuda")
    turns = [QKRope(HEADS, KV_HEADS, positions[n], rope.cos, rope.sin, noise(2 * SIZE), EPS) for n in range(CALLS)]
    slots = [torch.randperm(SLOTS, device="cuda")[:rows] for _ in range(CALLS)]
    qkv = noise(CALLS, rows, HEADS + 2 * KV_HEADS, SIZE)
    keys, values = noise(2, SLOTS, KV_HEADS, SIZE)
    calls = both(lambda ops, n: ops.rope_and_store(qkv[n], turns[n], keys, values, slots[n]))
    # In and out, and the cosines and sines of each row, float32 for half a head each.
    return Case("turn_and_store", rows, rows * (2 * (HEADS + 2 * KV_HEADS) * SIZE * ITEM + 4 * SIZE), **calls)


def part_logits(rows: int) -> Case:
    """Without the product that scores the centroids."""
    vocab_size = CENTROIDS * TOKENS
    x, scores, weight = noise(CALLS, rows, ASSISTANT), noise(CALLS, rows, CENTROIDS), noise(vocab_size, ASSISTANT)
    ids = torch.randperm(vocab_size, device="cuda").view(CENTROIDS, TOKENS)
    # Rows share what they read of the matrix: at most all of it. Of the ids too, which are int64.
    chosen = vocab_size * (1 - (1 - BEST / CENTROIDS) ** rows)
    moved = int(chosen * (ASSISTANT * ITEM + 8)) + rows * (ASSISTANT + CENTROIDS + vocab_size) * ITEM
    calls = both(lambda ops, n: ops.part_logits(x[n], scores[n], weight, ids, BEST))
    return Case("part_logits", rows, moved, **calls)


def compact(rows: int) -> Case:
    from stridelm.kernels import compaction

    tensors = [noise(SLOTS, KV_HEADS, SIZE) for _ in range(2 * LAYERS)]
    pools = compaction.Pools.of(tensors)
    pairs = [torch.randperm(SLOTS, device="cuda")[: 2 * rows].view(2, rows) for _ in range(CALLS)]

    def plainly(source: torch.Tensor, target: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    return Case(
        "compact",
        rows,
        2 * rows * len(tensors) * KV_HEADS * SIZE * ITEM,
        triton=[partial(compaction.compact, pools, *pair) for pair in pairs],
        plain=[partial(plainly, *pair) for pair in pairs],
    )


if __name__ == "__main__":
    sys.exit(main())
