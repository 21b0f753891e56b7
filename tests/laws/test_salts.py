"""Requests with another salt leave no trace: neither in the output nor in its reported cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stridelm import LLM, SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.llm import RequestOutput
from support.doubles.stand import Job, Stand, all_speculations, assert_same

PROMPT = [n * 7 % 50 for n in range(60)]


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


def run(llm: LLM, stand: Stand, kind: dict[str, object], salt: str | None) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, cache_salt=salt)
    return stand.run([Job(PROMPT, params, kind)], llm)[0]


def cost(output: RequestOutput) -> tuple[int, int, int, int]:
    metrics = output.metrics
    assert metrics is not None
    return metrics.cached_tokens, metrics.steps, metrics.drafted, metrics.accepted


@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_another_salt_leaves_no_trace(stand: Stand, drafter: str) -> None:
    """The same prompt, sent before with another salt or none: output and cost are those of an engine that has seen
    nothing. Sent before with the same salt, it hits the cache."""
    kinds = [kind for kind in all_speculations(stand) if kind["drafter"] == drafter][:1]
    if not kinds:
        pytest.skip(f"{drafter} cannot serve this model")
    fresh = run(stand.llm(page_size=4), stand, kinds[0], "mine")
    assert cost(fresh)[0] == 0
    llm = stand.llm(page_size=4)
    for other in ("theirs", None, "theirs"):
        run(llm, stand, kinds[0], other)
    first, again = (run(llm, stand, kinds[0], "mine") for _ in range(2))
    assert_same(first, fresh)
    assert cost(first) == cost(fresh)
    assert_same(again, fresh)
    assert cost(again)[0] > 0
    learns = DRAFTERS.get(drafter).host_bound
    assert (cost(again)[3] > cost(first)[3]) == learns


def test_samples_share_their_prompt(stand: Stand) -> None:
    """Samples of one request have its salt, and find one another's pages."""
    params = SamplingParams(max_tokens=4, seed=1, n=3, cache_salt="mine")
    llm = stand.llm(page_size=4, max_num_seqs=1)
    [output] = llm.generate(PROMPT, params)
    assert [sample.metrics.cached_tokens > 0 for sample in output.outputs if sample.metrics] == [False, True, True]


@pytest.mark.parametrize("salt", ["", "x" * 257, 3])
def test_invalid_salts(salt: object) -> None:
    with pytest.raises(ValueError, match="cache_salt must be text of 1 to 256 characters"):
        replace(SamplingParams(), cache_salt=salt)  # type: ignore[arg-type]
