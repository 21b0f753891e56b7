"""Trusted mask-token decoding emits, token for token, what a naive cache-free reference of the method emits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from support.checkpoints.models import EOS
from support.checks.identity import mixed_jobs
from support.checks.trust import (
    LENGTH,
    THRESHOLDS,
    WINDOWS,
    check_trust,
    expected,
    job,
    load,
    random_prompts,
    stopping,
)
from support.doubles.stand import Stand, assert_same
from support.doubles.tree_drafter import registered

SINGLE, EACH = 63, (57, 58, 59, 60, 61, 62, 63)
TEMPERATURES = (0.0, 0.8)
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {5: 3.0, 9: -4.0, 11: 2.0}},
    "bad_words": {"bad_words_token_ids": [[7], [11, 12], [20]]},
    "truncation": {"top_k": 7, "top_p": 0.8, "min_p": 0.02},
    "min_tokens": {"ignore_eos": False, "min_tokens": 9, "logit_bias": {EOS: 8.0}},
    "samples": {"n": 3},
}

pytestmark = pytest.mark.skipif("mask" not in DRAFTERS, reason="no mask-token drafter is installed")


@pytest.fixture(scope="module", params=[SINGLE, EACH], ids=["one-mask-id", "an-id-each-offset"])
def stand(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", scale=10.0), "float32", mask_token_id=request.param)


@pytest.fixture(scope="module")
def model(stand: Stand) -> Any:
    return load(stand)


def params(temperature: float, seed: int = 3, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True, **changes}
    return SamplingParams(temperature=temperature, seed=seed, **settings)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("k", WINDOWS)
def test_static_window(stand: Stand, model: Any, k: int, temperature: float) -> None:
    """Static k emits all k tokens of every window, and the length limit cuts the last one; k = 1 is plain decoding."""
    for prompt in random_prompts(3, seed=k):
        one = job(prompt, params(temperature), k)
        done = check_trust(stand, model, [one])[0]
        assert len(done.tokens) == LENGTH and done.steps == -(-LENGTH // k)
        if k == 1:
            assert stand.tokens(prompt, one.params) == done.tokens


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("tau", THRESHOLDS)
def test_confidence(stand: Stand, model: Any, tau: float, temperature: float) -> None:
    """With a threshold, the longest confident prefix of the window is emitted, and always one token."""
    for k in (2, 4, 8):
        jobs = [job(prompt, params(temperature), k, tau) for prompt in random_prompts(2, seed=k)]
        for one in jobs:
            check_trust(stand, model, [one])


def test_confidence_matters(stand: Stand, model: Any) -> None:
    """Between a threshold that is always met and one that never is, windows are cut in the middle."""
    prompts = random_prompts(6, seed=1)
    steps = [
        sum(expected(stand, model, job(p, params(0.0), 4, tau)).steps for p in prompts) for tau in (0.01, 0.5, 0.99)
    ]
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("chunk", [31, 1024])
def test_mixed(stand: Stand, model: Any, chunk: int, temperature: float) -> None:
    """Windows of all sizes and thresholds in one batch, chunked or not, do not change one another."""
    prompts = iter(random_prompts(len(WINDOWS) + 2 * len(THRESHOLDS), seed=2))
    jobs = [job(next(prompts), params(temperature, seed=k), k) for k in WINDOWS]
    jobs += [job(next(prompts), params(temperature), k, tau) for tau in THRESHOLDS for k in (3, 8)]
    check_trust(stand, model, jobs, max_num_batched_tokens=chunk, page_size=3)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_beside_exact(stand: Stand, model: Any, temperature: float) -> None:
    """Trusted windows and verified trees share a batch: each request emits what it emits alone."""
    with registered():
        exact = mixed_jobs(stand, 6, temperature, ["nothing", "repetition_penalty"], seed=3)
        trusted = [job(prompt, params(temperature), k) for k, prompt in zip(WINDOWS, random_prompts(5, seed=9))]
        outputs = stand.run([*exact, *trusted], max_num_batched_tokens=300)
        for one, output in zip(exact, outputs):
            assert_same(output, stand.plain(one.prompt, one.params))
        for one, output in zip(trusted, outputs[6:]):
            assert output.outputs[0].token_ids == expected(stand, model, one).tokens


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("feature", FEATURES)
def test_parameters(stand: Stand, model: Any, feature: str, temperature: float) -> None:
    """The window is drawn left to right: each row's parameters see the tokens just drawn."""
    changed = params(temperature, **FEATURES[feature])
    prompts = random_prompts(5, seed=4)
    windows: list[tuple[int, float | None]] = [(1, None), (2, None), (4, None), (8, None), (8, 0.6)]
    check_trust(stand, model, [job(prompt, changed, k, tau) for prompt, (k, tau) in zip(prompts, windows)])


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_stop_inside_the_window(stand: Stand, model: Any, temperature: float) -> None:
    """A stop token ends the request at its position, whatever the window drew after it."""
    jobs = [
        stopping(stand, model, job(prompt, params(temperature), k), place)
        for prompt, k, place in zip(random_prompts(6, seed=6), (2, 3, 4, 8, 4, 8), (1, 4, 6, 9, 9, 2))
    ]
    for one, done in zip(jobs, check_trust(stand, model, jobs)):
        stops = one.params.stop_token_ids
        assert stops and done.finish_reason == "stop" and done.tokens[-1] == stops[0]


@pytest.mark.parametrize("limit", [1, 2, 5, 8, 9])
def test_length_inside_the_window(stand: Stand, model: Any, limit: int) -> None:
    """max_tokens cuts inside the window exactly."""
    jobs = [job(p, params(0.0, max_tokens=limit), k) for p, k in zip(random_prompts(5, seed=7), WINDOWS)]
    assert all(len(done.tokens) == limit for done in check_trust(stand, model, jobs))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_preempted(stand: Stand, model: Any, temperature: float) -> None:
    """A preempted request continues with the same windows that it would have had."""
    prompts = random_prompts(6, seed=8)
    jobs = [job(p, params(temperature), k, tau) for p, k, tau in zip(prompts, (2, 4, 8, 3, 8, 4), (None, 0.7) * 3)]
    llm = stand.llm(page_size=2, num_pages=34)
    check_trust(stand, model, jobs, llm=llm)
    assert llm.engine.stats.preemptions > 0


def test_prefix_cache(stand: Stand, model: Any) -> None:
    """Pages written by windows hold real tokens only: a warm cache changes nothing."""
    llm = stand.llm(page_size=2)
    jobs = [job(p, params(0.0), k) for p, k in zip(random_prompts(5, seed=10), WINDOWS)]
    check_trust(stand, model, jobs, llm=llm)
    check_trust(stand, model, jobs, llm=llm)
    grown = [replace(one, prompt=one.prompt + expected(stand, model, one).tokens) for one in jobs]
    check_trust(stand, model, grown, llm=llm)


def test_logprobs_are_of_the_emitting_rows(stand: Stand, model: Any) -> None:
    """Every emitted token is scored by the raw logits of the row that it was drawn from."""
    one = job(random_prompts(1, seed=12)[0], params(0.0, logprobs=0), 4)
    sample = stand.alone(one).outputs[0]
    assert sample.logprobs is not None
    assert [next(iter(entry)) for entry in sample.logprobs] == sample.token_ids
    # Greedy and without penalties: the emitted token is its row's argmax.
    assert all(entry[token].rank == 1 for entry, token in zip(sample.logprobs, sample.token_ids))
