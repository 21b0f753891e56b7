"""An engine that has served requests of its own is as new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.engine.stats import EngineStats
from stridelm.engine.warm_up import LENGTHS, VARIANTS, warm_up_requests
from stridelm.schedule import Budget
from stridelm.schedule.depth_figures import DepthFigures
from support.checks.identity import prompts
from support.doubles.stand import Stand


@pytest.mark.parametrize("options", [{}, {"num_pages": 8}, {"max_num_batched_tokens": 40}], ids=str)
@pytest.mark.parametrize("drafter", ["none", "ngram", "eagle"])
def test_nothing_stays(checkpoint: Callable[..., Path], drafter: str, options: dict[str, Any]) -> None:
    """No page, no cached prefix, no count and no output, though the pool is too small for some of the requests."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")
    engine = stand.llm(drafter=drafter, depth=2 if drafter != "none" else None, **options).engine
    engine._warm_up()
    assert engine.queue.empty and engine.stats == EngineStats() and not engine.roster.outputs
    assert all(pages["free"] == pages["total"] for pages in engine.ledger.counts().values())
    engine.check()
    prompt, params = prompts(stand, 1)[0][:20], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    request = engine.add("a", prompt, params)
    while engine.busy:
        engine.step()
    assert request.output_ids == stand.plain(prompt, params).outputs[0].token_ids
    assert request.stats.cached_tokens == 0


@pytest.mark.parametrize("drafter", ["eagle", "mtp"])
def test_depths_are_measured(checkpoint: Callable[..., Path], drafter: str) -> None:
    """Where depths are chosen, each depth has been tried with few requests and with many, and nothing was learnt of
    texts: what the engine guessed in its own says nothing of others."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")
    engine = stand.llm(drafter=drafter, depth="auto", max_num_seqs=20).engine
    assert engine.adaptive is not None
    engine._warm_up()
    deepest = len(engine.intake.settled(SamplingParams())[1]) - 1
    assert deepest > 1 and engine.adaptive.cost.knows_decodes
    assert [engine.adaptive.cost.untried(count, deepest) for count in (1, 2, 5, 9, 16, 20)] == [None] * 6
    assert engine.adaptive.figures == DepthFigures()
    request = engine.add("a", prompts(stand, 1)[0], SamplingParams(max_tokens=2))
    assert engine.adaptive.explain([request]) is not None
    known = engine.adaptive.acceptance.known
    assert known.requests_P["checks"][known.places([request])] == 0


@pytest.mark.parametrize("grammars", [False, True])
def test_waves_cover_sizes_and_parameters(grammars: bool) -> None:
    """Prompts as long as the context allows, every class of parameters, and steps full of prompts."""
    budget = Budget(4096, 64)
    waves = list(warm_up_requests(50, 1000, budget, grammars=grammars))
    assert {len(prompt) for wave in waves for prompt, _ in wave} == {length for length in LENGTHS if length <= 996}
    assert len(waves) == (len(VARIANTS) + grammars + 1) * sum(length <= 996 for length in LENGTHS)
    assert all(len({params.speculation for _, params in wave}) == 2 for wave in waves), "drafted and not drafted"
    rows = [sum(len(prompt) for prompt, _ in wave) for wave in waves]
    assert max(rows) > 0.9 * budget.tokens and max(rows) <= budget.tokens
    assert max(map(len, waves)) == budget.requests
