"""The test stand: one engine that all variants share, and the jobs it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from stridelm.bench.drive import Job
from stridelm.bench.prompts import PromptSet
from stridelm.bench.variants import Variant, read_entry
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.engine.start import start
from stridelm.heap import freeze_heap
from stridelm.params import SamplingParams


def open_engine(
    model: str | None,
    streams: int,
    entries: Iterable[str | None] = (),
    *,
    prefix_caching: bool = False,
    **options: Any,
) -> Engine:
    """An engine with room for `streams` requests at once. Each request names its drafter. The process is taken to keep
    it until it ends (stridelm/heap.py).

    entries: what will be measured. If depths are to be chosen for one, it is the engine's default, which is made ready
    for that before it starts.
    """
    adaptive = next((asked for entry in entries if (asked := read_entry(entry or "auto")).adaptive), None)
    default: dict[str, Any] = {"drafter": "none"}
    if adaptive is not None:
        default = {"drafter": adaptive.drafter, "depth": "auto", "acceptance": adaptive.rule}
    engine = start(
        EngineConfig(
            model=model,
            **default,
            max_num_seqs=streams,
            enable_prefix_caching=prefix_caching,
            check_drafting=False,
            **options,
        )
    )
    freeze_heap()
    return engine


def encode(engine: Engine, prompts: PromptSet) -> list[list[int]]:
    """Token ids of each prompt."""
    assert engine.tokenizer is not None
    return [engine.tokenizer.encode(prompt.text) for prompt in prompts.prompts]


def check_variants(engine: Engine, variants: Sequence[Variant]) -> None:
    """Raise ValueError, before anything is measured, for a variant that the engine would refuse."""
    for variant in variants:
        engine.drafters.get(variant.drafter).rows_by_depth(variant.speculation)


def make_jobs(ids: Sequence[list[int]], variant: Variant, params: SamplingParams, seed: int) -> list[Job]:
    """One job per prompt. Each has its own seed, the same under every variant."""
    return [
        Job(prompt_ids, replace(params, seed=seed + i, speculation=variant.speculation))
        for i, prompt_ids in enumerate(ids)
    ]


def checkpoint_name(engine: Engine) -> str:
    """The model's name in results."""
    return "built-in" if engine.config.model is None else str(engine.config.model)
