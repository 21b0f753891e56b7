"""How long a model's matrix products take on a GPU: kernels/products.py, with its fixed order, beside the library.

    python benchmarks/gpu_products.py --json results/gpu_products.jsonl
    python benchmarks/gpu_products.py --tiles --rows 1,16,64,128,256

Shapes of an 8B model, of Qwen3-30B-A3B and of DeepSeek-V2-Lite in bfloat16. Every figure is the median over replays of
a CUDA graph of calls with different weights, enough of them to exceed the L2 cache. GB/s counts only the weights.
`bits` says whether the library's product has our kernel's bits at that number of rows: if so, deterministic mode uses
the library above 64 rows.

--tiles tries many tiles instead, and shows the fastest beside the one that `choose_tile` returns.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from rich.console import Console
from rich.table import Table
from timing import Calls, graph_us

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.kernels import products
from stridelm.kernels.processors import multiprocessors
from stridelm.kernels.products import Tile, library_agrees, product

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
    "30B qkv": (5120, 2048),
    "30B o": (2048, 4096),
    "Lite q": (3072, 2048),
    "Lite latent": (576, 2048),
    "Lite o": (2048, 2048),
}
"""Outputs and inputs."""
L2_BYTES = 256 << 20


@dataclass(frozen=True)
class Settings:
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
    products: tuple[str, ...] = tuple(SHAPES)
    replays: int = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, Settings.rows)))
    parser.add_argument("--products", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--replays", type=int, default=Settings.replays)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    if not torch.cuda.is_available():
        console.print("this benchmark needs a GPU, and torch sees no CUDA device here")
        return 1
    settings = Settings(tuple(map(int, args.rows.split(","))), tuple(args.products.split(",")), args.replays)
    if unknown := set(settings.products) - set(SHAPES):
        parser.error(f"no product {', '.join(sorted(unknown))}; choose from {', '.join(SHAPES)}")
    if args.tiles:
        for name in settings.products:
            console.print(tile_table(name, settings))
        return 0
    table = Table(
        box=None, pad_edge=False, title=f"products, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    for column in ("product", "rows", "ours us", "GB/s", "TFLOP/s", "library us", "library/ours", "bits"):
        table.add_column(column, justify="right")
    found = []
    for name in settings.products:
        for row in measure(name, settings):
            found.append(row)
            table.add_row(
                name,
                str(row["rows"]),
                f"{row['us']:.1f}",
                f"{row['gb_per_s']:.0f}",
                f"{row['tflop_per_s']:.0f}",
                f"{row['library_us']:.1f}",
                f"{row['library_us'] / row['us']:.2f}x",
                "same" if row["same_bits"] else "others",
            )
    console.print(table)
    if args.json:
        append_result(args.json, "gpu_products", settings, rows=found)
    return 0


def measure(name: str, settings: Settings) -> list[dict[str, Any]]:
    weights = make_weights(name)
    outputs, inputs = SHAPES[name]
    size = outputs * inputs * 2
    found = []
    for count in settings.rows:
        x = torch.randn(count, inputs, device="cuda", dtype=torch.bfloat16)
        ours = graph_us([partial(product, x, weight, None) for weight in weights], settings.replays)
        found.append(
            {
                "product": name,
                "rows": count,
                "us": ours,
                "library_us": graph_us([partial(F.linear, x, weight) for weight in weights], settings.replays),
                "gb_per_s": size / ours / 1e3,
                "tflop_per_s": count * size / ours / 1e6,
                "same_bits": library_agrees(x, weights[0], None),
            }
        )
    return found


def make_weights(name: str) -> list[torch.Tensor]:
    outputs, inputs = SHAPES[name]
    count = max(2, -(-L2_BYTES // (outputs * inputs * 2)))
    return [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5 for _ in range(count)]


def tile_table(name: str, settings: Settings) -> Table:
    """The three fastest tiles at each number of rows, and the chosen one's time over the best."""
    weights, (outputs, inputs) = make_weights(name), SHAPES[name]
    activation = "silu" if name == "gate_up" else None
    table = Table(box=None, pad_edge=False, title=name + (", gated" if activation else ""))
    for column in ("rows", "chosen", "us", "over best", "fastest: outputs x rows x inputs, warps, stages"):
        table.add_column(column, justify="right")
    for count in settings.rows:
        x = torch.randn(count, inputs, device="cuda", dtype=torch.bfloat16)
        calls = [partial(product, x, weight, None, activation) for weight in weights]
        chosen = products.choose_tile(count, outputs // (2 if activation else 1), activation is not None, x.device)
        tried = {chosen, *candidates(count, outputs, x.device)}
        times = {tile: tile_us(tile, calls, settings.replays) for tile in tried}
        best = sorted((us, tile) for tile, us in times.items() if us is not None)[:3]
        shown = "; ".join(f"{us:.1f} {as_text(tile)}" for us, tile in best)
        us = times[chosen] or math.inf
        table.add_row(str(count), as_text(chosen), f"{us:.1f}", f"{us / best[0][0]:.2f}x", shown)
    return table


def candidates(rows: int, outputs: int, device: torch.device) -> list[Tile]:
    heights = [size for size in (16, 32, 64, 128) if size >= min(rows, 64) and size <= 2 * rows + 16]
    widths, depths, stages = [64, 128], [64, 128], [2, 3, 4, 5, 6, 8]
    if outputs < 64 * multiprocessors(device):
        widths, depths, stages = [16, 32, 64], [128, 256], [3, 4, 6, 8, 10]
    return [
        Tile(width, height, depth, warps, staged)
        for width, height, depth, staged in itertools.product(widths, heights, depths, stages)
        for warps in ((4, 8) if width * height >= 128 * 64 else (4,))
        if (width + height) * depth * 2 * staged <= 220 * 1024
    ]


def tile_us(tile: Tile, calls: Calls, replays: int) -> float | None:
    """None for a tile that does not fit on the processor."""
    try:
        with mock.patch.object(products, "choose_tile", return_value=tile):
            return graph_us(calls, replays)
    except triton.runtime.errors.OutOfResources:
        return None


def as_text(tile: Tile) -> str:
    return f"{tile.outputs}x{tile.rows}x{tile.inputs},{tile.warps},{tile.stages}"


if __name__ == "__main__":
    sys.exit(main())
