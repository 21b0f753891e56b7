"""One request's failure affects no other: if a step raises while it works for a request, that request ends with an
error that says so, and the output of all others is the same as without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stridelm import LLM
from stridelm.faults import EngineFault
from stridelm.types import Request
from support.checks.grammar import jobs_of
from support.checks.identity import mixed_jobs, prompts, sampling
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.faults import guilty_from, plant, plant_in_grammars, stages
from support.doubles.stand import Job, Stand
from support.doubles.tree_drafter import registered

MANY, POISON = 16, 11
STAGES = sorted(stages(LLM().engine))
BEFORE = [stage for stage in STAGES if stage.startswith("admit")]
"""Stages that a request runs through once, before it has output."""


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with bounds_registered(), registered():
        yield


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


@pytest.fixture(scope="module")
def lagging(checkpoint: Callable[..., Path]) -> LaggingStand:
    return LaggingStand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


def run(stand: Stand, llm: LLM, jobs: list[Job], poison: set[int]) -> list[Request]:
    """Run all jobs as requests "0", "1", ...; those not poisoned emit what plain decoding emits."""
    engine = llm.engine
    requests = [engine.add(str(i), job.prompt, job.request) for i, job in enumerate(jobs)]
    ended = []
    for _ in range(4000):
        if not engine.busy:
            break
        ended += [output.request.id for output in engine.step() if output.finished]
        llm.check()
    assert not engine.busy and sorted(ended) == sorted(request.id for request in requests)
    assert engine.ledger.counts()["full"]["held"] == 0
    for i, (job, request) in enumerate(zip(jobs, requests)):
        wanted = stand.plain(job.prompt, job.params).outputs[0]
        if i in poison:
            assert request.finish_reason == "error" and request.error == "Planted inside the engine"
            assert request.output_ids == wanted.token_ids[: len(request.output_ids)]
        else:
            assert (request.output_ids, request.finish_reason) == (wanted.token_ids, wanted.finish_reason), job
    assert engine.stats.failed == len(poison)
    return requests


def finish(llm: LLM) -> None:
    """Step until nothing is left to do."""
    while llm.engine.busy:
        llm.engine.step()


def crowd(stand: Stand) -> list[Job]:
    """Sixteen requests with all kinds of drafters and parameters."""
    features = ["nothing", "everything", "logprobs", "repetition_penalty"]
    return [job for seed in (1, 2) for job in mixed_jobs(stand, MANY // 2, 0.7, features, seed)]


@pytest.mark.parametrize(
    ("stage", "tokens"), [(stage, 0) for stage in STAGES] + [(stage, 7) for stage in STAGES if stage not in BEFORE]
)
def test_one_among_sixteen(stand: Stand, stage: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its start or midway, in any stage: one request ends, fifteen continue, and later ones are served."""
    llm = stand.llm(page_size=4)
    jobs = crowd(stand)
    with monkeypatch.context() as patch:
        plant(llm.engine, stage, guilty_from(tokens, str(POISON)), patch.setattr)
        run(stand, llm, jobs, {POISON})
    llm.engine.stats.failed = 0
    run(stand, llm, jobs, set())


@pytest.mark.parametrize("stage", ["reserve", "forward", "verify", "commit", "emit"])
def test_with_a_step_in_flight(lagging: LaggingStand, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where the host reads one step late."""
    llm = lagging.llm(page_size=4)
    plant(llm.engine, stage, guilty_from(7, str(POISON)), monkeypatch.setattr)
    run(lagging, llm, crowd(lagging), {POISON})


def test_grammar(speaking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a matcher fails only its own request."""
    pytest.importorskip("llguidance")
    stand = Stand(speaking, "float32", options={"skip_tokenizer_init": False})
    kinds: list[dict[str, Any]] = [{"drafter": "none"}, {"drafter": "ngram", "prompt_lookup_min": 1}] * 3
    jobs = jobs_of("regex", 1.0, kinds)
    for job in jobs:
        stand.plain(job.prompt, job.params)
    plant_in_grammars(guilty_from(2, "3"), monkeypatch)
    run(stand, stand.llm(), jobs, {3})


@pytest.mark.parametrize("poison", [{3, 4}, {0, 5, 15}, set(range(MANY))], ids=len)
def test_several(stand: Stand, poison: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several failing requests is found, whether they are adjacent or all of them."""
    llm = stand.llm()
    plant(llm.engine, "forward", guilty_from(4, *map(str, poison)), monkeypatch.setattr)
    run(stand, llm, crowd(stand), poison)


def test_a_transient_fault(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails once is retried, and no request is blamed."""
    llm = stand.llm()
    left = [True] * 3

    def guilty(requests: Iterable[Request]) -> bool:
        return bool(left) and any(len(r.output_ids) > 5 * (4 - len(left)) for r in requests) and left.pop()

    plant(llm.engine, "observe", guilty, monkeypatch.setattr)
    run(stand, llm, crowd(stand), set())
    assert not left


def test_fault_of_no_request(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that fails for any batch, or for requests that it can serve separately, reports that: no request is
    blamed, and once the engine works again they all end as they would have."""
    for guilty in (
        lambda requests: bool(list(requests)),
        lambda requests: len({r.id for r in requests} & {"2", "9"}) > 1,
    ):
        llm = stand.llm()
        jobs = crowd(stand)
        requests = [llm.engine.add(str(i), job.prompt, job.request) for i, job in enumerate(jobs)]
        with monkeypatch.context() as patch:
            plant(llm.engine, "forward", guilty, patch.setattr)
            with pytest.raises(EngineFault):
                finish(llm)
        llm.check()
        assert all(request.finish_reason != "error" for request in requests)
        finish(llm)
        for job, request in zip(jobs, requests):
            assert request.output_ids == stand.tokens(job.prompt, job.params)


def test_tracer_faults_reach_the_caller(stand: Stand) -> None:
    """An exception in a tracer reaches the caller of `step` and is blamed on no request; later steps go on."""
    llm = stand.llm()
    jobs = crowd(stand)
    requests = [llm.engine.add(str(i), job.prompt, job.request) for i, job in enumerate(jobs)]

    def watch(*_: object) -> None:
        raise OSError("no space left to write a trace to")

    llm.engine.tracer = watch
    for _ in range(3):
        with pytest.raises(OSError, match="no space left"):
            llm.engine.step()
        llm.check()
    llm.engine.tracer = None
    finish(llm)
    for job, request in zip(jobs, requests):
        assert request.output_ids == stand.tokens(job.prompt, job.params)
    assert llm.engine.stats.failed == llm.engine.stats.failed_steps == 0


def test_offline(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` returns the others' full output and the failed one's error; a stream of it ends with the error."""
    llm = stand.llm()
    texts = prompts(stand, 4)
    params = [sampling(stand, prompt, 0.7, "nothing") for prompt in texts]
    plant(llm.engine, "emit", guilty_from(5, "2.0", "4.0"), monkeypatch.setattr)
    outputs = [output.outputs[0] for output in llm.generate(texts, params)]
    assert [output.finish_reason for output in outputs] == ["length", "length", "error", "length"]
    assert outputs[2].error == "Planted inside the engine" and all(o.error is None for o in outputs if o != outputs[2])
    last = list(llm.stream(texts[0], params[0]))[-1].outputs[0]
    assert last.finish_reason == "error" and last.error == "Planted inside the engine"
    llm.check()
