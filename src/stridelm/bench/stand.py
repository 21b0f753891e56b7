"""The test stand: one engine that every kind of decoding shares, and the jobs that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stridelm.bench.drive import Job
from stridelm.bench.prompts import PromptSet
from stridelm.bench.variants import Variant
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams


def open_engine(model: str | None, streams: int, *, prefix_caching: bool = False, **options: Any) -> Engine:
    """An engine with room for `streams` requests at once. Whoever drafts is said by each request."""
    return Engine(
        EngineConfig(model=model, drafter="none", max_num_seqs=streams, enable_prefix_caching=prefix_caching, **options)
    )


def encode(engine: Engine, prompts: PromptSet) -> list[list[int]]:
    """Token ids of each prompt."""
    assert engine.tokenizer is not None
    return [engine.tokenizer.encode(prompt.text) for prompt in prompts.prompts]


def check_variants(engine: Engine, variants: Sequence[Variant]) -> None:
    """Raise ValueError for a variant that the engine would refuse: before anything is measured, not in the middle."""
    for variant in variants:
        engine.drafters.get(variant.drafter).rows_by_depth(variant.speculation)


def make_jobs(ids: Sequence[list[int]], variant: Variant, params: SamplingParams, seed: int) -> list[Job]:
    """One job a prompt. Each has a seed of its own, the same under every variant."""
    return [
        Job(prompt_ids, replace(params, seed=seed + i, speculation=variant.speculation))
        for i, prompt_ids in enumerate(ids)
    ]


def checkpoint_name(engine: Engine) -> str:
    """What a row calls the model."""
    return "built-in" if engine.config.model is None else str(engine.config.model)
