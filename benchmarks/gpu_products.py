"""How long a model's matrix products take on a GPU: kernels/products.py, which adds in one order, beside the library.

    python benchmarks/gpu_products.py --json results/gpu_products.json

Shapes of an 8B model in bfloat16. Every figure is the median over replays of a CUDA graph of calls with different
weights, enough of them to be too much for the L2 cache. GB/s counts the weights alone. `bits` says whether the
library's product has our kernel's bits at that number of rows: in deterministic mode it then takes over above 64 rows.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from timing import graph_us

from stridelm.bench.report import write_json
from stridelm.kernels.products import library_agrees, product

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
"""Outputs and inputs."""
L2_BYTES = 256 << 20


@dataclass(frozen=True)
class Settings:
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
    replays: int = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, Settings.rows)))
    parser.add_argument("--replays", type=int, default=Settings.replays)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    if not torch.cuda.is_available():
        console.print("no GPU here: this benchmark needs one")
        return 1
    settings = Settings(tuple(map(int, args.rows.split(","))), args.replays)
    table = Table(
        box=None, pad_edge=False, title=f"products, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    for column in ("product", "rows", "ours us", "GB/s", "TFLOP/s", "library us", "library/ours", "bits"):
        table.add_column(column, justify="right")
    found = []
    for name in SHAPES:
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
        write_json(args.json, "gpu_products", settings, rows=found)
    return 0


def measure(name: str, settings: Settings) -> list[dict[str, Any]]:
    outputs, inputs = SHAPES[name]
    size = outputs * inputs * 2
    make = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(outputs, inputs, **make) * inputs**-0.5 for _ in range(max(2, -(-L2_BYTES // size)))]
    found = []
    for count in settings.rows:
        x = torch.randn(count, inputs, **make)
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


if __name__ == "__main__":
    sys.exit(main())
