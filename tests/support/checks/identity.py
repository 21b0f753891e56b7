"""Checks of token identity, as functions shared by the CPU's tests and the GPU's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stridelm import SamplingParams
from stridelm.llm import RequestOutput
from stridelm.types import MAX_DRAFT_ROWS
from support.checkpoints.models import EOS
from support.doubles.stand import Job, Stand, accepted, all_speculations, assert_same
from support.doubles.tree_drafter import NAME as TREE
from support.doubles.tree_drafter import ROWS, RandomTreeDrafter

TEMPERATURES = (0.0, 0.7, 1.0)
LENGTH = 20
POOL = 12
Feature = Callable[[list[int]], dict[str, Any]]
FEATURES: dict[str, Feature] = {
    "nothing": lambda free: {},
    "top_k": lambda free: {"top_k": 5},
    "top_p": lambda free: {"top_p": 0.7},
    "min_p": lambda free: {"min_p": 0.1},
    "repetition_penalty": lambda free: {"repetition_penalty": 1.4},
    "presence_penalty": lambda free: {"presence_penalty": 1.5},
    "frequency_penalty": lambda free: {"frequency_penalty": 1.2},
    "logit_bias": lambda free: {"logit_bias": {free[0]: -9.0, free[3]: 2.0, 7: 3.0}},
    "bad_words": lambda free: {"bad_words_token_ids": [[free[0]], free[2:4], free[4:7]]},
    "stop_token_ids": lambda free: {"stop_token_ids": [free[LENGTH // 2]]},
    "eos": lambda free: {"ignore_eos": False, "logit_bias": {EOS: 6.0}},
    "min_tokens": lambda free: {
        "ignore_eos": False,
        "logit_bias": {EOS: 6.0},
        "min_tokens": LENGTH // 2,
        "stop_token_ids": [free[2]],
    },
    "samples": lambda free: {"n": 3},
    "logprobs": lambda free: {"logprobs": 3, "prompt_logprobs": 2, "logprob_token_ids": [7, 1, 30]},
    "hidden_states": lambda free: {"return_hidden_states": True},
    "everything": lambda free: {
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {free[0]: -1.0, 5: 2.0, EOS: 2.0},
        "bad_words_token_ids": [free[1:3], [free[4]]],
        "stop_token_ids": [free[12]],
        "ignore_eos": False,
        "min_tokens": 6,
        "logprobs": 2,
    },
}
"""Parameters that a request may set, derived from its output without them, so that they change the output."""
SIMPLE = {
    name for name in FEATURES if name not in ("logit_bias", "bad_words", "stop_token_ids", "min_tokens", "everything")
}


def prompts(stand: Stand, count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts; every second one repeats itself, so that there is something to look up.

    They come from a pool, so that their plain decoding is computed only once.
    """
    rng = random.Random("the pool")
    vocab = stand.target.vocab_size - 1
    pool = []
    for index in range(POOL):
        ids = [rng.randrange(vocab) for _ in range(rng.randint(3, 40))]
        pool.append(ids + ids[: rng.randrange(len(ids))] if index % 2 else ids)
    return random.Random(seed).sample(pool, count)


def sampling(stand: Stand, prompt: list[int], temperature: float, feature: str) -> SamplingParams:
    """A request with one feature on. Its seed depends only on its prompt, so it is the same in every test."""
    seed = (sum(prompt) << 40) + len(prompt)
    free = SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=seed, ignore_eos=True)
    plain = [] if feature in SIMPLE else stand.tokens(prompt, _unending(free))
    return replace(free, **FEATURES[feature](plain))


def _unending(params: SamplingParams) -> SamplingParams:
    return replace(params, stop_token_ids=None, ignore_eos=True, max_tokens=LENGTH + 6)


def teach(stand: Stand, job: Job) -> None:
    """Give the tree drafter the output of plain decoding, continued beyond the stop if the request may stop early."""
    params = job.params
    if params.structured_outputs is not None:
        pass  # the grammar decides where the output ends
    elif params.min_tokens == 0 and (params.stop_token_ids or not params.ignore_eos or params == free_of(params)):
        params = _unending(params)
    for sample in stand.plain(job.prompt, params).outputs:
        RandomTreeDrafter.teach(job.prompt, params.seed, sample.index, sample.token_ids)


def free_of(params: SamplingParams) -> SamplingParams:
    """The same request with no feature on."""
    return SamplingParams(
        temperature=params.temperature, max_tokens=params.max_tokens, seed=params.seed, ignore_eos=True
    )


def tree_speculations() -> list[dict[str, Any]]:
    return [{"drafter": TREE, "depth": depth} for depth in (1, 3, len(ROWS) - 1)]


def mixed_jobs(
    stand: Stand, count: int, temperature: float, features: Sequence[str], seed: int = 0, longest: int | None = None
) -> list[Job]:
    """Jobs of all kinds: each its own prompt (cut to `longest` tokens), drafter, depth and feature, in turn."""
    rng = random.Random(seed)
    kinds = [*all_speculations(stand), *tree_speculations()]
    rng.shuffle(kinds)
    jobs = []
    for index, prompt in enumerate(prompts(stand, count, seed)):
        prompt = prompt[:longest]
        feature = features[index % len(features)]
        params = sampling(stand, prompt, temperature, feature)
        jobs.append(Job(prompt, params, kinds[index % len(kinds)]))
    return jobs


def trusting_neighbours(stand: Stand, temperature: float, seed: int = 0) -> list[Job]:
    """Jobs under the lossy rule, whose windows change the shape of every step."""
    kinds = all_speculations(stand, "trust")
    params = SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=seed, ignore_eos=True)
    return [Job(prompt, params, kind) for prompt, kind in zip(prompts(stand, len(kinds), seed + 1), kinds)]


def check_identity(stand: Stand, jobs: Sequence[Job], lossy: Sequence[Job] = (), **options: Any) -> list[RequestOutput]:
    """All in one batch, every job emits what plain decoding emits, and the lossy ones what they emit alone.

    Returns the jobs' outputs, for their metrics. options: the engine's, or `llm`.
    """
    for job in jobs:
        if (job.speculation or {}).get("drafter") == TREE:
            teach(stand, job)
    llm = options.pop("llm", None) or stand.llm(**options)
    failed = llm.engine.stats.failed_steps
    outputs = stand.run([*jobs, *lossy], llm)
    assert llm.engine.stats.failed_steps == failed, "a step failed, and its requests were retried"
    for job, output in zip(jobs, outputs):
        assert_same(output, stand.plain(job.prompt, job.params), (job.speculation, job.params))
    for job, output in zip(lossy, outputs[len(jobs) :]):
        assert_same(output, stand.alone(job), (job.speculation, job.params))
    return outputs[: len(jobs)]


def check_crowd(stand: Stand, temperature: float, features: Sequence[str], **options: Any) -> None:
    """Requests that preempt one another, some with drafts and trusted windows, emit what they emit alone.

    The pool holds one request with its widest window but not several. Who is preempted depends on the drafts, and so
    on the registered drafters: several seeds are tried until a preemption happens.
    """
    for seed in range(4, 12):
        jobs = mixed_jobs(stand, 8, temperature, features, seed, longest=8)
        llm = stand.llm(page_size=4, num_pages=(8 + LENGTH + MAX_DRAFT_ROWS) // 4 + 1, **options)
        check_identity(stand, jobs, trusting_neighbours(stand, temperature)[:2], llm=llm)
        if llm.engine.stats.preemptions:
            return
    raise AssertionError("no request was preempted with any seed")


def check_alone(
    stand: Stand,
    kind: dict[str, Any],
    temperature: float,
    feature: str,
    which: Sequence[int] = (0, 1),
    **options: Any,
) -> int:
    """One drafter, one request at a time, with these of two prompts. Returns the number of accepted guesses."""
    total = 0
    both = prompts(stand, 2, seed=3)
    for prompt in (both[index] for index in which):
        job = Job(prompt, sampling(stand, prompt, temperature, feature), kind)
        total += accepted(check_identity(stand, [job], **options))
    return total
