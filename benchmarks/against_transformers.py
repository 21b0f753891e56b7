"""Plain decoding against transformers' `generate`: same weights, dtype, threads and prompts, in one process.

    python benchmarks/against_transformers.py [MODEL] --batch 1,8 --json results/against_transformers.json

Both decode greedily with a KV cache, for exactly --max-tokens tokens; prompts of a batch are padded on the
left for transformers. The two take turns, in alternating order; the ratio is taken within a round and its
median is the figure. Stride runs as it is shipped: paging, sampler, detokenising and all. transformers
returns ids only.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from stridelm.bench.drive import drive
from stridelm.bench.environment import device_name, dtype_name
from stridelm.bench.prompts import load_prompts
from stridelm.bench.report import write_json
from stridelm.bench.stand import checkpoint_name, encode, make_jobs, open_engine
from stridelm.bench.variants import plain
from stridelm.builtin import builtin_path
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Settings:
    model: str | None
    """None: the built-in one."""
    batch: tuple[int, ...]
    max_tokens: int
    num_prompts: int
    repeats: int
    dtype: str
    device: str


@dataclass(frozen=True)
class Row:
    model: str
    device: str
    dtype: str
    batch: int
    prompts: int
    completion_tokens: int
    stride_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float
    ratios: tuple[float, ...]
    same_outputs: int
    """Prompts whose outputs agree. In 16 bits two implementations part at near-ties; neither is wrong."""
    mean_agreeing_tokens: float
    """Leading tokens that agree."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--batch", default="1,8", help="batch sizes between commas (default: 1,8)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32 (default: auto, as Stride chooses)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    batch = tuple(int(size) for size in args.batch.split(","))
    settings = Settings(args.model, batch, args.max_tokens, args.num_prompts, args.repeats, args.dtype, args.device)
    rows = measure(settings)
    show(rows)
    if args.json:
        write_json(args.json, "against_transformers", settings, rows=[vars(row) for row in rows])
    return 0


def measure(settings: Settings) -> list[Row]:
    engine = open_engine(settings.model, max(settings.batch), dtype=settings.dtype, device=settings.device)
    dtype = next(engine.parts.model.parameters()).dtype
    hf = AutoModelForCausalLM.from_pretrained(settings.model or builtin_path(), dtype=dtype, local_files_only=True)
    hf = hf.eval().to(engine.parts.device)
    hf.generation_config.eos_token_id = None  # both write exactly max_tokens
    prompts = load_prompts().first(settings.num_prompts)
    return [measure_batch(engine, hf, encode(engine, prompts), size, settings) for size in settings.batch]


def measure_batch(engine: Engine, hf: Any, ids: list[list[int]], size: int, settings: Settings) -> Row:
    ids = list(itertools.islice(itertools.cycle(ids), -(-len(ids) // size) * size))
    run_stride(engine, ids[:size], size, WARM_UP_TOKENS)
    run_transformers(hf, ids[:size], size, WARM_UP_TOKENS)
    ours: list[float] = []
    theirs: list[float] = []
    for repeat in range(settings.repeats):
        for side in ("ours", "theirs") if repeat % 2 == 0 else ("theirs", "ours"):
            if side == "ours":
                mine, seconds = run_stride(engine, ids, size, settings.max_tokens)
                ours.append(len(ids) * settings.max_tokens / seconds)
            else:
                other, seconds = run_transformers(hf, ids, size, settings.max_tokens)
                theirs.append(len(ids) * settings.max_tokens / seconds)
    ratios = tuple(a / b for a, b in zip(ours, theirs))
    agreeing = [common_prefix(a, b) for a, b in zip(mine, other)]
    return Row(
        model=checkpoint_name(engine),
        device=device_name(engine),
        dtype=dtype_name(engine),
        batch=size,
        prompts=len(ids),
        completion_tokens=len(ids) * settings.max_tokens,
        stride_tokens_per_s=statistics.median(ours),
        transformers_tokens_per_s=statistics.median(theirs),
        ratio=statistics.median(ratios),
        ratios=ratios,
        same_outputs=sum(a == b for a, b in zip(mine, other)),
        mean_agreeing_tokens=statistics.mean(agreeing),
    )


def run_stride(engine: Engine, ids: Sequence[list[int]], streams: int, tokens: int) -> tuple[list[list[int]], float]:
    """(outputs, seconds)."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    run = drive(engine, make_jobs(ids, plain(engine.parts.target), params, seed=0), streams)
    return [timeline.token_ids for timeline in run.timelines], run.seconds


@torch.inference_mode()
def run_transformers(hf: Any, ids: Sequence[list[int]], size: int, tokens: int) -> tuple[list[list[int]], float]:
    """(outputs, seconds), a batch after the other."""
    outputs: list[list[int]] = []
    start = time.perf_counter()
    for first in range(0, len(ids), size):
        chunk = ids[first : first + size]
        width = max(map(len, chunk))
        padded = torch.tensor([[0] * (width - len(row)) + row for row in chunk], device=hf.device)
        seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in chunk], device=hf.device)
        out = hf.generate(
            padded,
            attention_mask=seen,
            max_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        outputs += out[:, width:].tolist()
    return outputs, time.perf_counter() - start


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def show(rows: list[Row]) -> None:
    head = rows[0]
    table = Table(box=None, pad_edge=False, title=f"{head.model}, {head.dtype}, {head.device}", title_justify="left")
    for name in (
        "batch",
        "Stride tokens/s",
        "transformers tokens/s",
        "ratio",
        "rounds",
        "same outputs",
        "agreeing",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.batch),
            f"{row.stride_tokens_per_s:.1f}",
            f"{row.transformers_tokens_per_s:.1f}",
            f"{row.ratio:.2f}x",
            f"{min(row.ratios):.2f} to {max(row.ratios):.2f}",
            f"{row.same_outputs} of {row.prompts}",
            f"{row.mean_agreeing_tokens:.1f} tokens",
        )
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
