"""Drafters serve a model in every dtype that an engine offers."""

from __future__ import annotations

import pytest

from stridelm import LLM, SamplingParams

PROMPTS = ["def add(a, b):\n", "The sea was"]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize(("drafter", "depth"), [("mtp", 3), ("mtp", "auto"), ("eagle", 3), ("frozen_kv", 2)])
def test_dtypes_that_nothing_is_compiled_for(drafter: str, depth: int | str, dtype: str) -> None:
    """The built-in model's text is plain decoding's, and something of it was drafted."""
    llm = LLM(device="cpu", dtype=dtype, drafter=drafter, depth=depth, check_drafting=False)
    texts = {}
    for speculation in ("off", None):
        params = SamplingParams(temperature=0.0, max_tokens=24, speculation=speculation)
        texts[speculation] = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    assert texts["off"] == texts[None] and all(texts["off"])
    assert depth == "auto" or llm.engine.stats.accepted > 0
