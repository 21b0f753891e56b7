"""The CPU's kernels in bfloat16 on one core: attention with AVX512-BF16 and without, and products of a layer's weights
with the next block fetched meanwhile and without.

    python benchmarks/cpu_kernels.py

Shapes are the built-in model's. Attention is measured twice: again and again over the same entries, which then lie in
the caches, and each time over those of another layer after as much as a layer's weights has been read, as in a step.
Products read the weights of all layers, 24 MB, one after another. The two kinds take turns; ratios are medians over
turns, and above 1 if the first kind is faster.

Legend: as in kernels/host/attention.py.
"""

# mypy: disable-error-code="call-arg"
from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numba as nb
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from stridelm.kernels.host import attention, avx512, pair_attention
from stridelm.kernels.host.geometry import TILE_QUERIES, tiles
from stridelm.kernels.host.memory import array

HEADS, KV_HEADS, SIZE, LAYERS, PAGE = 6, 2, 64, 8, 16
PRODUCTS = ((10, 384), (6, 384), (30, 384), (6, 960))
"""(blocks of outputs, inputs) of a layer's weights."""
CASES = ((8, 1, 64), (8, 1, 128), (8, 1, 512), (1, 1, 1024), (8, 4, 128), (8, 4, 512), (1, 256, 256), (1, 1024, 1024))
"""(spans, rows of each, entries that the last row sees)."""
ROWS = (1, 4, 8, 16, 32, 64)

Ways = dict[str, Callable[[], object]]


def turns(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Way -> seconds of each turn."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in taken.items()}


def row(table: Table, case: str, macs: int, taken: dict[str, list[float]]) -> None:
    first, second = taken.values()
    ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
    middles = [statistics.median(times) for times in (first, second)]
    table.add_row(
        case, *(f"{1e6 * middle:,.1f}" for middle in middles), f"{ratio:.2f}x", f"{macs / middles[0] / 1e9:.0f}"
    )


def attends(spans: int, rows: int, entries: int) -> tuple[int, list[Ways]]:
    """Multiplications of one call, and for each layer the two ways of making it."""
    pool = spans * entries + 4096
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    q = random(spans * rows, HEADS, SIZE)
    out = torch.empty_like(q)
    pages = torch.randperm(pool // PAGE, generator=draw)[: spans * entries // PAGE].numpy()
    slots = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(spans, entries)
    firsts = np.arange(spans, dtype=np.int32) * rows
    limits = np.tile(np.arange(entries - rows + 1, entries + 1), spans)
    nothing = np.zeros(spans * rows, np.int64)
    tiled = tiles(firsts, spans * rows, TILE_QUERIES // (HEADS // KV_HEADS))
    seen = (slots, tiled, limits, nothing, nothing, sys.maxsize, np.float32(SIZE**-0.5))
    layers: list[Ways] = []
    for _ in range(LAYERS):
        stored = random(2, pool, KV_HEADS, SIZE)
        arguments: tuple[Any, ...] = (array(q), array(stored[0]), array(stored[1]), *seen, array(out))
        layers.append(
            {
                "pairs": partial(pair_attention.attend, *arguments),
                "one by one": partial(attention.attend, *arguments),
            }
        )
    return int(2 * HEADS * SIZE * limits.sum()), layers


def attention_tables(rounds: int) -> list[Table]:
    cached, cold = (
        Table("case", "pairs us", "one by one us", "ratio", "GMAC/s", title=title)
        for title in ("attention, entries in the caches", "attention, as between other work")
    )
    other = torch.randn(LAYERS, sum(64 * blocks * inputs for blocks, inputs in PRODUCTS)).bfloat16()
    for spans, rows, entries in CASES:
        macs, layers = attends(spans, rows, entries)
        case = f"{spans} x {rows} rows, {entries} entries"
        row(cached, case, macs, turns(layers[0], rounds))
        taken: dict[str, list[float]] = {name: [] for name in layers[0]}
        for name, layer in list(itertools.product(layers[0], range(LAYERS))) * max(1, rounds // LAYERS):
            other[layer].sum()
            start = time.perf_counter()
            layers[layer][name]()
            taken[name].append(time.perf_counter() - start)
        row(cold, case, macs, taken)
    return [cached, cold]


@nb.njit(error_model="numpy")
def fetching(inputs: Any, weights: Any, sums_NB: Any) -> None:
    for index in range(len(weights)):
        weight = weights[index]
        for block in range(weight.shape[0]):
            following = min(block + 1, weight.shape[0] - 1)
            avx512.multiply(inputs[int(weight.shape[1] > 12)], weight, block, following, sums_NB)


@nb.njit(error_model="numpy")
def waiting(inputs: Any, weights: Any, sums_NB: Any) -> None:
    for index in range(len(weights)):
        weight = weights[index]
        for block in range(weight.shape[0]):
            avx512.multiply_cached(inputs[int(weight.shape[1] > 12)], weight, block, sums_NB)


def product_table(rounds: int) -> Table:
    table = Table("rows", "fetching us", "waiting us", "ratio", "GMAC/s", title="products of eight layers")
    numbers = np.random.default_rng(0)
    shapes = [(blocks, inputs // 32, 16, 64) for blocks, inputs in PRODUCTS * LAYERS]
    weights = tuple(numbers.integers(0, 1 << 14, shape, np.uint32) for shape in shapes)
    macs = sum(64 * blocks * inputs for blocks, inputs in PRODUCTS * LAYERS)
    for rows in ROWS:
        inputs = tuple(numbers.integers(0, 1 << 14, (rows, width), np.uint16) for width in (384, 960))
        sums = np.zeros((rows, 64), np.float32)
        ways: Ways = {
            "fetching": partial(fetching, inputs, weights, sums),
            "waiting": partial(waiting, inputs, weights, sums),
        }
        row(table, str(rows), rows * macs, turns(ways, rounds))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=64, help="turns of each kind")
    rounds: int = parser.parse_args(arguments).rounds
    if not avx512.is_available():
        parser.error("this CPU has no AVX512-BF16, and so only one of each two kinds")
    torch.set_num_threads(1)
    console = Console()
    for table in (*attention_tables(rounds), product_table(rounds)):
        console.print(table)


if __name__ == "__main__":
    main()
