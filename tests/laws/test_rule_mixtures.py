"""Rules share a step as drafters do: a request emits what it emits alone, whatever its neighbours' rules and drafters
are, and however much of their prompts is still to be run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.verify import RULES
from support.checks.identity import LENGTH, TEMPERATURES, prompts, sampling
from support.doubles.stand import Job, Stand, assert_same, depths_of, speculation

LEARNERS = {"suffix"}
"""Their drafts depend on earlier requests, and so does the output of a rule that weighs drafts."""
FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.8},
    "bias": {"logit_bias": {5: 3.0, 9: -4.0}},
    "bad_words": {"bad_words_token_ids": [[7], [11, 12], [20]]},
    "logprobs": {"logprobs": 2},
}


def acceptance(rule: str) -> str:
    """The rule as a request names it."""
    return f"{rule}:1.5" if RULES.get(rule).simulated else rule


def rules_of(drafter: str) -> list[str]:
    kind = DRAFTERS.get(drafter)
    return [rule for rule in RULES if RULES.get(rule).works_with(kind.rules, kind.branches)]


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


PLAIN = [rule for rule in rules_of("none") if not RULES.get(rule).simulated]
"""Rules that can decide without a draft."""


def plain(rule: str) -> dict[str, Any]:
    return {"drafter": "none", "acceptance": rule}


@pytest.mark.parametrize("pair", list(itertools.permutations(PLAIN, 2)), ids="-".join)
def test_no_draft(stand: Stand, pair: tuple[str, str]) -> None:
    """Two rules without a draft row in a step of few rows, while a third request still prefills: the number of deciding
    rows equals the number of one rule's requests, but those rows are not that rule's."""
    for feature, third in itertools.product(("nothing", "penalties"), pair):
        jobs = [
            Job([5] * 2, SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True), plain(pair[0])),
            Job([9, 8], SamplingParams(temperature=0.0, max_tokens=LENGTH, **FEATURES[feature]), plain(pair[1])),
            Job([3] * 40, SamplingParams(temperature=0.8, seed=4, max_tokens=3), plain(third)),
        ]
        outputs = stand.run(jobs, max_num_batched_tokens=4)
        for job, output in zip(jobs, outputs):
            assert_same(output, stand.alone(job), (job.speculation, feature))


def ways(stand: Stand) -> list[dict[str, Any]]:
    """Every drafter that can serve the target, at every depth and under every rule that it works with."""
    able = [name for name in DRAFTERS if name not in LEARNERS and DRAFTERS.get(name).why_not(stand.target) is None]
    found = []
    for name in able:
        for rule, depth in itertools.product(rules_of(name), depths_of(name)):
            if RULES.get(rule).simulated and not DRAFTERS.get(name).default_depth:
                continue
            found.append(speculation(stand, name, depth, acceptance(rule)))
    return found


def mixed(stand: Stand, seed: int, temperature: float) -> tuple[list[Job], list[Job]]:
    """Nine requests with rules, drafters and depths at random, and three with long prompts."""
    rng = random.Random(seed)
    jobs = [
        Job(prompt, sampling(stand, prompt, temperature, rng.choice(("nothing", "everything", "logprobs"))), kind)
        for prompt, kind in zip(prompts(stand, 9, seed), rng.sample(ways(stand), 9))
    ]
    readers = [
        Job([rng.randrange(60) for _ in range(150)], SamplingParams(temperature=temperature, seed=n, max_tokens=4), k)
        for n, k in enumerate(rng.sample(ways(stand), 3))
    ]
    return jobs, readers


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("seed", range(6))
def test_mixtures(stand: Stand, seed: int, temperature: float) -> None:
    """With enough rows for every draft, each request emits what it emits alone, under any rule."""
    jobs = [job for part in mixed(stand, seed, temperature) for job in part]
    outputs = stand.run(jobs, max_num_batched_tokens=4096, page_size=4)
    for job, output in zip(jobs, outputs):
        assert_same(output, stand.alone(job), job.speculation)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("seed", range(6))
def test_mixtures_in_chunks(stand: Stand, seed: int, temperature: float) -> None:
    """With prompts that take many steps to prefill and leave few rows or none for drafts, the exact requests emit what
    they emit alone."""
    jobs, readers = mixed(stand, seed, temperature)
    exact = [Job(job.prompt, job.params, {"drafter": "ngram", "prompt_lookup_min": 1}) for job in jobs[:3]]
    everything = [*readers, *exact, *jobs]
    outputs = stand.run(everything, max_num_batched_tokens=150, page_size=4)
    for job, output in zip(everything, outputs):
        if (job.speculation or {}).get("acceptance", "exact") == "exact":
            assert_same(output, stand.alone(job), job.speculation)


@pytest.mark.parametrize("confidence", [None, 0.4])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.skipif("mask" not in DRAFTERS, reason="no mask-token drafter is installed")
def test_trusted_prompts_in_chunks(stand: Stand, feature: str, confidence: float | None) -> None:
    """A trusted request whose prompt takes several steps, in which nothing is decided, emits what it emits when the
    prompt takes one; alone, and beside requests that decide meanwhile."""
    prompt = [n * 7 % 60 for n in range(100)]
    kind = {"drafter": "mask", "acceptance": "trust", "depth": 3, "confidence": confidence}
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=LENGTH, ignore_eos=True, **FEATURES[feature])
    job = Job(prompt, params, kind)
    beside = [Job([5, 6, 7], sampling(stand, [5, 6, 7], 0.7, "everything"), {"drafter": "none"})]
    for chunk, neighbours in itertools.product((9, 33), ([], beside)):
        output = stand.run([*neighbours, job], max_num_batched_tokens=chunk)[-1]
        assert_same(output, stand.alone(job), (chunk, len(neighbours)))
