"""`hybrid`, which drafts each request by a head or by lookup, against both alone: the built-in model on a CPU.

    python benchmarks/drafter_per_request.py --json results/drafter_per_request.jsonl
    python benchmarks/drafter_per_request.py --drafters mtp@3,hybrid@3 --prompts 4 --tokens 32

Three batches of requests, each decoded by every drafter with the same seeds, and so into the same tokens:

    copies   greedily, after a prompt that holds a shipped held-out text twice and the beginning of a third copy
    varied   at temperature 0.8, after the texts themselves
    mixed    half of both

Tokens per step are those of a request's own steps. CPU milliseconds per token are of the whole process, in one thread,
and the least of --rounds; what was learnt is dropped before each. `by` says which source made how many of the drafts,
and which share of its tokens was accepted.
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stridelm import LLM, SamplingParams
from stridelm.bench.prompts import load_prompts
from stridelm.bench.results import append_result

BATCHES = ("copies", "varied", "mixed")
PASSAGE, BEGINNING = 96, 16
"""Tokens of a text that is copied, and of its last copy."""


@dataclass(frozen=True)
class Settings:
    prompts: int
    tokens: int
    rounds: int
    streams: int


@dataclass(frozen=True)
class Row:
    batch: str
    drafter: str
    tokens: int
    steps: int
    cpu_ms_per_token: float
    by_source: dict[str, Any]

    @property
    def by(self) -> str:
        parts = (
            f"{name} {counts['drafts']} ({counts['accepted'] / counts['drafted']:.0%})"
            for name, counts in sorted(self.by_source.items())
        )
        return ", ".join(parts)


def requests_of(llm: LLM, batch: str, count: int, tokens: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and parameters."""
    assert llm.engine.tokenizer is not None
    encode = llm.engine.tokenizer.encode
    texts = [encode(prompt.text) for prompt in load_prompts().first(count).prompts]
    made = []
    for number, text in enumerate(texts):
        copies = batch == "copies" or (batch == "mixed" and number % 2 == 0)
        passage = text[:PASSAGE]
        prompt = [*passage, *passage, *passage[:BEGINNING]] if copies else text
        temperature = 0.0 if copies else 0.8
        made.append((prompt, SamplingParams(temperature=temperature, max_tokens=tokens, seed=number, ignore_eos=True)))
    return made


def measure(llm: LLM, batch: str, drafter: str, count: int, tokens: int, rounds: int) -> Row:
    """One batch with one drafter."""
    name, _, depth = drafter.partition("@")
    speculation = {"drafter": name, **({"depth": "auto" if depth == "auto" else int(depth)} if depth else {})}
    prompts, params = zip(*requests_of(llm, batch, count, tokens), strict=True)
    asked = [replace(each, speculation=speculation) for each in params]
    least, outputs = float("inf"), []
    for _ in range(rounds):
        llm.engine.forget()
        began = time.process_time()
        outputs = llm.generate(list(prompts), asked)
        least = min(least, time.process_time() - began)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    total: dict[str, dict[str, int]] = {}
    for each in metrics:
        for source, counts in each.by_source.items():
            mine = total.setdefault(source, dict.fromkeys(asdict(counts), 0))
            for key, value in asdict(counts).items():
                mine[key] += value
    emitted = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = sum(each.steps for each in metrics)
    return Row(batch, drafter, emitted, steps, 1e3 * least / emitted, total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", default="none,mtp@3,ngram@4,hybrid@3,hybrid@4,hybrid@8", help="NAME[@DEPTH],...")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    llm = LLM(device="cpu", depth=None, max_num_seqs=args.streams, check_drafting=False, itl_target_ms=0)
    rows = [
        measure(llm, batch, drafter, args.prompts, args.tokens, args.rounds)
        for batch in BATCHES
        for drafter in args.drafters.split(",")
    ]
    table = Table("batch", "drafter", "tokens/step", "CPU ms/token", "drafts by (accepted)")
    for row in rows:
        table.add_row(row.batch, row.drafter, f"{row.tokens / row.steps:.2f}", f"{row.cpu_ms_per_token:.2f}", row.by)
    Console(width=120).print(table)
    if args.json:
        settings = Settings(args.prompts, args.tokens, args.rounds, args.streams)
        append_result(args.json, "drafter_per_request", settings, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
