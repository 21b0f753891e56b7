"""Where the host's time goes in steps of many requests: planning, pages, tables, landing, emission.

    python benchmarks/host_time.py --streams 16,64,256

No step takes less than this, however small the model and fast the device. Requests only decode, and the model is one
narrow layer with random weights, so that what is left is the host's. Medians over steps, in microseconds, of what each
call takes without the timed calls in it; "device" is that layer on a CPU, and launching it on a GPU, "wait" is for the
verdict, and "rest" is what lies between the calls.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_decode import speculation
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.cache.transaction import Transaction
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.engine.outcome import Reading
from stridelm.params import SamplingParams
from stridelm.run.state import PageTables
from stridelm.upload import Mark

PARTS = ("plan", "enter", "reserve", "tables", "device", "wait", "outcome", "policy", "commit", "emit")
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
PROMPT, UNTIMED = 64, 40
"""Tokens of a prompt; steps before those that are timed."""


class Clock:
    """Adds up what calls take, by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._inside = [0.0]

    def step(self, engine: Engine) -> None:
        self.steps.append(dict.fromkeys((*PARTS, "whole"), 0.0))
        began = time.perf_counter()
        engine.step()
        self.steps[-1]["whole"] = time.perf_counter() - began

    def wrap(self, owner: Any, name: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                if self.steps:
                    self.steps[-1][part] += took - self._inside.pop()
                self._inside[-1] += took

        setattr(owner, name, timed)


def open_engine(streams: int, tokens: int) -> Engine:
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            drafter="none",
            skip_tokenizer_init=True,
            max_num_seqs=streams,
            max_num_batched_tokens=max(2048, 8 * streams),
            max_model_len=PROMPT + tokens,
            num_pages=streams * (-(-(PROMPT + tokens) // 16) + 2),
        )
        return Engine(config)


def measure(streams: int, decoding: str, steps: int) -> dict[str, float]:
    """Microseconds of each part."""
    tokens = 4 * (steps + UNTIMED) + 16
    engine, clock = open_engine(streams, tokens), Clock()
    parts = engine.steps
    calls: tuple[tuple[Any, str, str], ...] = (
        (parts.planner, "plan", "plan"),
        (parts.roster, "enter", "enter"),
        (parts.roster.ledger, "reserve", "reserve"),
        (parts.device, "run", "device"),
        (parts.planner.depths, "landed", "policy"),
        (parts.emitter, "emit", "emit"),
        (Transaction, "commit", "commit"),
        (PageTables, "update", "tables"),
        (Reading, "outcome", "outcome"),
        (Mark, "wait", "wait"),
    )
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in calls]
    for owner, name, part in calls:
        clock.wrap(owner, name, part)
    try:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, speculation=speculation(decoding))
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, SHAPE["vocab_size"], (streams, PROMPT), generator=generator).tolist()
        requests = [engine.add(str(number), prompt, params) for number, prompt in enumerate(prompts)]
        while any(len(request.output_ids) < UNTIMED for request in requests):
            engine.step()
        for _ in range(steps):
            clock.step(engine)
        assert engine.busy and all(request.finish_reason is None for request in requests)
    finally:
        for owner, name, call in kept:
            setattr(owner, name, call)
    found = {part: 1e6 * median(step[part] for step in clock.steps) for part in (*PARTS, "whole")}
    rest = 1e6 * median(step["whole"] - sum(step[part] for part in PARTS) for step in clock.steps)
    return {**found, "rest": rest}


@dataclass(frozen=True)
class Settings:
    streams: tuple[int, ...]
    decoding: tuple[str, ...]
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="16,64,256")
    parser.add_argument("--decoding", default="plain,ngram@3:synthetic:2.0")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(tuple(map(int, args.streams.split(","))), tuple(args.decoding.split(",")), args.steps)
    columns = (*PARTS, "rest", "whole")
    table = Table(title="Microseconds per step")
    for column in ("decoding", "streams", *columns):
        table.add_column(column, justify="left" if column == "decoding" else "right")
    rows = []
    for decoding in settings.decoding:
        for streams in settings.streams:
            found = measure(streams, decoding, settings.steps)
            rows.append({"decoding": decoding, "streams": streams, **found})
            table.add_row(decoding, str(streams), *(f"{found[column]:.0f}" for column in columns))
    Console(width=160).print(table)
    if args.json:
        append_result(args.json, "host_time", settings, rows=rows)


if __name__ == "__main__":
    main()
