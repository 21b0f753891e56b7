"""How long it takes to draw tokens on the GPU: the kernels of kernels/draw.py beside the sampler's torch code.

    python benchmarks/gpu_draw_kernels.py --json results/gpu_draw_kernels.json

A vocabulary of 128,256 in bfloat16. The kernels are timed in a CUDA graph of many calls over different logits, enough
of them to be too much for the L2 cache; the sampler as it runs, launched from the host. Microseconds are medians over
replays; GB/s is the logits read once over that time.

  greedy         the argmax of the raw logits
  sampled        temperature 0.8
  min-p          the same, with min-p 0.05
  mixed          a third of the rows each
  top-k          temperature 0.8, top-k 50
  top-p          temperature 0.8, top-p 0.95
  top-k, top-p   both
  confidence     the largest probability of the raw softmax
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import Calls, graph_us, median_us

from stridelm.bench.report import write_json
from stridelm.params import SamplingParams, Speculation
from stridelm.sample.processors import Rows
from stridelm.sample.sampler import Sampler, raw_confidence
from stridelm.sample.table import Feature, SamplingTable
from stridelm.types import Request

L2_BYTES = 256 << 20
"""What the calls of a graph must read at least, all together: five times an H200's cache."""
MOST_CALLS = 64
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8}
MIN_P: dict[str, Any] = {"temperature": 0.8, "min_p": 0.05}
MIXTURES: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": (GREEDY,),
    "sampled": (SAMPLED,),
    "min-p": (MIN_P,),
    "mixed": (GREEDY, SAMPLED, MIN_P),
    "top-k": ({**SAMPLED, "top_k": 50},),
    "top-p": ({**SAMPLED, "top_p": 0.95},),
    "top-k, top-p": ({**SAMPLED, "top_k": 50, "top_p": 0.95},),
}
"""The requests that the rows take turns to belong to."""


@dataclass(frozen=True)
class Settings:
    vocab: int = 128256
    rows: tuple[int, ...] = (1, 16, 64, 256, 1024)
    replays: int = 5


@dataclass
class History:
    tokens: torch.Tensor
    known: torch.Tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 64 rows")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    if not torch.cuda.is_available():
        console.print("benchmarks/gpu_draw_kernels.py times kernels on a GPU, and torch sees no CUDA device here")
        return 1
    settings = replace(Settings(), rows=(1, 64)) if args.quick else Settings()
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    tables, rows = draw_section(settings.vocab, settings.rows, settings.replays)
    for table in tables:
        console.print(table)
    if args.json:
        write_json(args.json, "gpu_draw_kernels", settings, draw=rows)
    return 0


def draw_section(vocab: int, rows: tuple[int, ...], replays: int) -> tuple[list[Table], list[dict[str, Any]]]:
    """(tables for the eye, rows for JSON)"""
    found = []
    for count in rows:
        bytes_read = count * vocab * 2
        calls = min(MOST_CALLS, max(4, -(-L2_BYTES // bytes_read)))
        logits = [torch.randn(count, vocab, device="cuda").mul_(3).bfloat16() for _ in range(calls)]
        timed = {name: (graph_us(ours, replays), eager_us(theirs, replays)) for name, ours, theirs in _work(logits)}
        for name, (ours, theirs) in timed.items():
            found.append(
                {
                    "rows": count,
                    "work": name,
                    "us": ours,
                    "gb_per_s": bytes_read / 1000 / ours,
                    "sampler_us": theirs,
                }
            )
        del logits
        torch.cuda.empty_cache()
    table = Table(box=None, pad_edge=False, title=f"draw: vocabulary of {vocab:,}, bfloat16")
    for column in ("rows", "work", "kernel us", "GB/s", "sampler us", "ratio"):
        table.add_column(column, justify="right")
    for row in found:
        times = (f"{row['us']:.1f}", f"{row['gb_per_s']:.0f}", f"{row['sampler_us']:.1f}")
        table.add_row(str(row["rows"]), row["work"], *times, f"{row['sampler_us'] / row['us']:.1f}x")
    return [table], found


def _work(logits: list[torch.Tensor]) -> list[tuple[str, Calls, Calls]]:
    """(name, calls of the kernels, calls of the sampler), a call for each of the logits."""
    from stridelm.kernels.draw import confidence

    work = [(name, *_draws(logits, mixture)) for name, mixture in MIXTURES.items()]
    ours: Calls = [lambda each=each: confidence(each) for each in logits]
    theirs: Calls = [lambda each=each: raw_confidence(each) for each in logits]
    return [*work, ("confidence", ours, theirs)]


def _draws(logits: list[torch.Tensor], mixture: tuple[dict[str, Any], ...]) -> tuple[Calls, Calls]:
    from stridelm.kernels.draw import draw
    from stridelm.kernels.truncate import truncate

    count, vocab = logits[0].shape
    table = SamplingTable(len(mixture), vocab, "cuda")
    for slot, params in enumerate(mixture):
        table.set(slot, Request(str(slot), [0], SamplingParams(**params), Speculation(), seed=slot))
    slots = [row % len(mixture) for row in range(count)]
    rows = Rows(torch.tensor(slots, device="cuda"), torch.arange(count, device="cuda") + 1)
    nothing = torch.zeros(len(mixture), 1, dtype=torch.int64, device="cuda")
    sampler = Sampler(table, History(nothing, nothing[:, 0]))
    features = [table.features(slot) for slot in range(len(mixture))]
    sampled = torch.tensor([Feature.SAMPLED in each for each in features], device="cuda")
    any_of = Feature(0)
    for each in features:
        any_of |= each
    top_k = table.top_k if Feature.TOP_K in any_of else None
    top_p = table.top_p if Feature.TOP_P in any_of else None
    min_p = table.log_min_p if Feature.MIN_P in any_of else None

    def one(each: torch.Tensor) -> torch.Tensor:
        cut = None
        if top_k is not None or top_p is not None:
            cut = truncate(each, rows.slots, table.temperature, sampled, table.log_min_p, top_k, top_p)
        columns = (table.temperature, table.seed, table.sample_index, sampled, min_p)
        return draw(each, rows.slots, rows.positions, *columns, cut=cut)

    ours: Calls = [lambda each=each: one(each) for each in logits]
    theirs: Calls = [lambda each=each: sampler.draw(each, rows, slots) for each in logits]
    return ours, theirs


def eager_us(calls: Calls, replays: int) -> float:
    """Microseconds of a call launched from the host, at most eight calls at a time: the sampler takes its while."""

    def run() -> None:
        for call in calls[:8]:
            call()

    return median_us(run, min(8, len(calls)), replays)


if __name__ == "__main__":
    sys.exit(main())
