"""How long drawing tokens takes on the GPU: the sampler's kernels against its torch code.

    python benchmarks/gpu_draw_kernels.py --json results/gpu_draw_kernels.jsonl

A vocabulary of 128,256 in bfloat16. The kernels are timed in a CUDA graph of many calls over different logits, enough
of them to exceed the L2 cache; the torch code is timed as launched from the host. Microseconds are medians over
replays; GB/s is the logits read once over that time.

  greedy         the argmax of the raw logits
  sampled        temperature 0.8
  min-p          the same, with min-p 0.05
  mixed          a third of the rows of each of the above
  top-k          temperature 0.8, top-k 50
  top-p          temperature 0.8, top-p 0.95
  top-k, top-p   both
  penalties      temperature 0.8; repetition, presence and frequency over 4,096 tokens, half of them the prompt
  bias           temperature 0.8, 300 logit biases
  all edits      both, with 10 bad words and a minimum of tokens
  confidence     the largest probability of the raw softmax
  cut: ...       only where top-k and top-p cut the rows, as every captured step computes it: for greedy rows, which ask
                 for nothing, and as above
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernel_sections import calls_past_cache
from rich.console import Console
from rich.table import Table
from timing import Calls, graph_us, median_us

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.kernels import plain_logits
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.params import SamplingParams, Speculation
from stridelm.sample.rows import Rows
from stridelm.sample.sampler import Sampler
from stridelm.sample.table import SamplingTable
from stridelm.types import Request

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8}
MIN_P: dict[str, Any] = {"temperature": 0.8, "min_p": 0.05}
HISTORY = 4096
"""Tokens of every request, prompt and output."""
PENALTIES: dict[str, Any] = {
    **SAMPLED,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.1,
}
BIAS: dict[str, Any] = {"logit_bias": dict.fromkeys(range(0, 30000, 100), 1.0)}
ALL_EDITS: dict[str, Any] = {
    **PENALTIES,
    **BIAS,
    "bad_words_token_ids": [[token, token + 1] for token in range(10)],
    "min_tokens": HISTORY,
    "max_tokens": HISTORY,
}
MIXTURES: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": (GREEDY,),
    "sampled": (SAMPLED,),
    "min-p": (MIN_P,),
    "mixed": (GREEDY, SAMPLED, MIN_P),
    "top-k": ({**SAMPLED, "top_k": 50},),
    "top-p": ({**SAMPLED, "top_p": 0.95},),
    "top-k, top-p": ({**SAMPLED, "top_k": 50, "top_p": 0.95},),
    "penalties": (PENALTIES,),
    "bias": ({**SAMPLED, **BIAS},),
    "all edits": (ALL_EDITS,),
}
"""The requests to which the rows belong, in turn."""


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
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
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
        append_result(args.json, "gpu_draw_kernels", settings, draw=rows)
    return 0


def draw_section(vocab: int, rows: tuple[int, ...], replays: int) -> tuple[list[Table], list[dict[str, Any]]]:
    """(tables for the terminal, rows for JSON)"""
    found: list[dict[str, Any]] = []
    for count in rows:
        bytes_read = count * vocab * 2
        calls = calls_past_cache(bytes_read)
        logits = [torch.randn(count, vocab, device="cuda").mul_(3).bfloat16() for _ in range(calls)]
        timed = {name: (graph_us(ours, replays), eager_us(theirs, replays)) for name, ours, theirs in _work(logits)}
        for name, (ours, theirs) in timed.items():
            found.append(
                {
                    "rows": count,
                    "work": name,
                    "us": ours,
                    "gb_per_s": bytes_read / 1000 / ours,
                    "torch_us": theirs,
                }
            )
        del logits
        torch.cuda.empty_cache()
    table = Table(box=None, pad_edge=False, title=f"draw: vocabulary of {vocab:,}, bfloat16")
    for column in ("rows", "work", "kernel us", "GB/s", "torch us", "ratio"):
        table.add_column(column, justify="right")
    for row in found:
        times = (f"{row['us']:.1f}", f"{row['gb_per_s']:.0f}", f"{row['torch_us']:.1f}")
        table.add_row(str(row["rows"]), row["work"], *times, f"{row['torch_us'] / row['us']:.1f}x")
    return [table], found


def _work(logits: list[torch.Tensor]) -> list[tuple[str, Calls, Calls]]:
    """(name, calls of the kernels, calls of the torch code), one call for each of the logits."""
    from stridelm.kernels.draw import confidence

    work = [(name, *_draws(logits, mixture)) for name, mixture in MIXTURES.items()]
    ours: Calls = [partial(confidence, each) for each in logits]
    theirs: Calls = [partial(plain_logits.confidence, each) for each in logits]
    cuts = [(f"cut: {name}", *_cuts(logits, MIXTURES[name][0])) for name in ("greedy", "top-p", "top-k, top-p")]
    return [*work, ("confidence", ours, theirs), *cuts]


def _cuts(logits: list[torch.Tensor], params: dict[str, Any]) -> tuple[Calls, Calls]:
    from stridelm.kernels.triton_step import TritonStepOps

    count, vocab = logits[0].shape
    table = SamplingTable(1, vocab, "cuda")
    table.set(0, Request("0", [0], SamplingParams(**params), Speculation(), seed=0), [0, 1])
    slots_M = torch.zeros(count, dtype=torch.int64, device="cuda")
    sampled = torch.tensor([params["temperature"] > 0], device="cuda")
    asked = slots_M, table.temperature, sampled, table.log_min_p, table.top_k, table.top_p
    ours: Calls = [partial(TritonStepOps.truncate, each, *asked) for each in logits]
    theirs: Calls = [partial(PlainStepOps.truncate, each, *asked) for each in logits]
    return ours, theirs


def _draws(logits: list[torch.Tensor], mixture: tuple[dict[str, Any], ...]) -> tuple[Calls, Calls]:
    count, vocab = logits[0].shape
    table = SamplingTable(len(mixture), vocab, "cuda")
    prompt = [0] * (HISTORY // 2)
    for slot, params in enumerate(mixture):
        request = Request(str(slot), prompt, SamplingParams(**params), Speculation(), seed=slot)
        table.set(slot, request, [0, 1], params.get("bad_words_token_ids", ()))
    slots = [row % len(mixture) for row in range(count)]
    known = torch.full((len(mixture),), HISTORY, device="cuda")
    history = History(torch.randint(vocab, (len(mixture), HISTORY), device="cuda"), known)
    sampler, plain = Sampler(table, history), Sampler(table, history, PlainStepOps())
    slots_M = torch.tensor(slots, device="cuda")
    rows = Rows(slots_M, known[slots_M], longest=HISTORY)
    ours: Calls = [partial(sampler.draw, each, rows, slots) for each in logits]
    theirs: Calls = [partial(plain.draw, each, rows, slots) for each in logits]
    return ours, theirs


def eager_us(calls: Calls, replays: int) -> float:
    """Microseconds of a call launched from the host, with at most eight calls at a time, because torch is slow."""

    def run() -> None:
        for call in calls[:8]:
            call()

    return median_us(run, min(8, len(calls)), replays)


if __name__ == "__main__":
    sys.exit(main())
