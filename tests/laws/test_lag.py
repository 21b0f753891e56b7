"""The laws where the host reads one step late: an engine on a CPU that plans on bounds, like one on a GPU.

The host plans the next step without knowing anything that the device decides (lengths, drafts, verdicts).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from support.checks.identity import (
    TEMPERATURES,
    check_crowd,
    check_identity,
    mixed_jobs,
    prompts,
    teach,
    trusting_neighbours,
)
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.poison import KINDS, POOL, check_pages, requests
from support.doubles.stand import assert_same
from support.doubles.tree_drafter import registered

UNSCORED = ["nothing", "repetition_penalty", "stop_token_ids"]
"""Without log-probabilities, because a step that computes them lands at once."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with bounds_registered(), registered():
        yield


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> LaggingStand:
    return LaggingStand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_identity(stand: LaggingStand, temperature: float) -> None:
    """Mixed drafters and parameters, trusted windows, log-probabilities and several samples in one batch."""
    features = ["nothing", "everything", "logprobs", "samples", "stop_token_ids", "repetition_penalty"]
    jobs = mixed_jobs(stand, 8, temperature, features, seed=3)
    llm = stand.llm(page_size=4)
    check_identity(stand, jobs, trusting_neighbours(stand, temperature)[:2], llm=llm)
    assert llm.engine.steps.lag == 1 and not llm.engine.steps.flights


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks(stand: LaggingStand, chunk: int) -> None:
    jobs = mixed_jobs(stand, 4, 0.7, ["nothing", "everything", "logprobs"], seed=chunk)
    check_identity(stand, jobs, page_size=1, max_num_batched_tokens=chunk)


@pytest.mark.parametrize("caching", [False, True])
def test_preemption(stand: LaggingStand, caching: bool) -> None:
    """A request that is preempted with one of its steps in flight emits what it would have emitted otherwise."""
    check_crowd(stand, 0.7, UNSCORED, enable_prefix_caching=caching)


def test_aborts_in_flight(stand: LaggingStand) -> None:
    """Requests are aborted at random moments with a step in flight; their neighbours and the ledger are unaffected."""
    jobs = mixed_jobs(stand, 6, 0.7, UNSCORED, seed=6)
    rng = random.Random(0)
    llm = stand.llm(page_size=4, max_num_seqs=6, max_num_batched_tokens=48)
    engine = llm.engine
    for job in jobs:
        teach(stand, job)
    spare = [job for seed in range(3) for job in mixed_jobs(stand, 8, 0.7, ["nothing"], seed)]
    requests = [engine.add(f"kept-{i}", job.prompt, job.request) for i, job in enumerate(jobs)]
    doomed: list[str] = []
    in_flight = 0
    while any(request.finish_reason is None for request in requests):
        if spare and rng.random() < 0.6:
            job = spare.pop()
            doomed.append(engine.add(f"doomed-{len(spare)}", job.prompt, job.request).id)
        if doomed and rng.random() < 0.5:
            name = doomed.pop(rng.randrange(len(doomed)))
            in_flight += any(span.request.id == name for flight in engine.steps.flights for span in flight.plan.spans)
            engine.abort(name)
        engine.step()
    assert in_flight > 0
    for name in doomed:
        engine.abort(name)
    while engine.busy:
        engine.step()
    llm.check()
    for job, request in zip(jobs, requests):
        assert request.output_ids == stand.tokens(job.prompt, job.params)


def test_unheld_pages_are_left_alone(stand: LaggingStand) -> None:
    """Padding, finished and aborted requests and steps in flight neither write nor read pages that no request holds."""
    poisoned, clean = (stand.llm(**POOL).engine for _ in range(2))
    assert check_pages(poisoned, clean, requests(stand, KINDS)) > 100


EDGE: list[dict[str, Any]] = [
    {"drafter": "none"},
    {"drafter": "mask", "depth": 7},
    {"drafter": "mask", "depth": 1},
    {"drafter": "ngram", "depth": 40, "prompt_lookup_min": 1},
    {"drafter": "mask", "depth": 40, "acceptance": "trust"},
]


@pytest.mark.parametrize("max_tokens", [8, None])
@pytest.mark.parametrize("kind", EDGE, ids=lambda kind: f"{kind['drafter']}-{kind.get('depth')}")
def test_the_edge_of_the_context(stand: LaggingStand, kind: dict[str, Any], max_tokens: int | None) -> None:
    """Steps in flight may reach beyond the context; it is still filled to its last token."""
    prompts = [[7 * i % 61 for i in range(80 + 2 * n)] for n in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    llm = stand.llm(max_model_len=100, page_size=4, max_num_seqs=5)
    outputs = llm.generate(prompts, replace(params, speculation=kind))
    llm.check()
    for prompt, output in zip(prompts, outputs):
        said = output.outputs[0].token_ids
        assert len(said) == (max_tokens or 100 - len(prompt))
        if kind.get("acceptance") != "trust":
            plain = stand.tokens(prompt, replace(params, max_tokens=len(said)))
            assert said == plain


def test_log_probabilities_are_read_behind_too(stand: LaggingStand) -> None:
    """A step that reports them is left unread like any other, and they are those of plain decoding."""
    llm = stand.llm()
    engine, prompt = llm.engine, prompts(stand, 1)[0]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    engine.add("a", prompt, params)
    in_flight = []
    while engine.busy:
        engine.step()
        in_flight.append(len(engine.steps.flights))
    assert in_flight.count(1) >= 11
    assert_same(llm.generate(prompt, params)[0], stand.plain(prompt, params))
