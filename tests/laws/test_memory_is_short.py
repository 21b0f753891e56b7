"""A step that runs out of memory is retried with fewer rows: no request ends, none loses or changes a token, and steps
have all their rows again when memory is back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from stridelm import LLM
from stridelm.batch import ForwardBatch
from stridelm.types import Request
from support.checks.identity import mixed_jobs
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.stand import Job, Stand
from support.doubles.tree_drafter import registered


def of_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def of_a_driver() -> None:
    raise RuntimeError("Triton Error [CUDA]: out of memory")


SHORTAGES: dict[str, Callable[[], object]] = {
    "gpu": of_a_gpu,
    "driver": of_a_driver,
    "torch": lambda: torch.empty(2**60, dtype=torch.uint8),
    "numpy": lambda: np.empty(2**60, dtype=np.uint8),
}
"""What fails for want of memory."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with bounds_registered(), registered():
        yield


@pytest.fixture(scope="module")
def stands(checkpoint: Callable[..., Path]) -> dict[str, Stand]:
    path = checkpoint("qwen3", tie_word_embeddings=True)
    return {"at once": Stand(path, "float32"), "in flight": LaggingStand(path, "float32")}


def crowd(stand: Stand) -> list[Job]:
    features = ["nothing", "everything", "logprobs", "repetition_penalty"]
    return [job for seed in (1, 2) for job in mixed_jobs(stand, 6, 0.7, features, seed)]


def add(llm: LLM, jobs: list[Job]) -> list[Request]:
    return [llm.engine.add(str(number), job.prompt, job.request) for number, job in enumerate(jobs)]


def finish(llm: LLM) -> None:
    for _ in range(4000):
        if not llm.engine.busy:
            return
        llm.engine.step()
        llm.check()
    raise AssertionError("requests do not end")


def check(stand: Stand, jobs: list[Job], requests: list[Request]) -> None:
    for job, request in zip(jobs, requests, strict=True):
        wanted = stand.plain(job.prompt, job.params).outputs[0]
        assert (request.output_ids, request.finish_reason) == (wanted.token_ids, wanted.finish_reason), job


def short_of(llm: LLM, limit: int, fail: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """No step of more than `limit` rows finds memory for its forward pass."""
    forward = llm.engine.runner.forward

    def maybe(batch: ForwardBatch) -> Any:
        if len(batch.ids) > limit:
            fail()
        return forward(batch)

    patch.setattr(llm.engine.runner, "forward", maybe)


@pytest.mark.parametrize("shortage", SHORTAGES)
@pytest.mark.parametrize("way", ["at once", "in flight"])
def test_fewer_rows_for_a_while(
    stands: dict[str, Stand], way: str, shortage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand = stands[way]
    llm, jobs = stand.llm(page_size=4, max_num_batched_tokens=256), crowd(stand)
    engine, rows = llm.engine, llm.engine.steps.planner.rows
    caplog.set_level(logging.INFO, logger="stridelm.engine")
    with monkeypatch.context() as patch:
        short_of(llm, 40, SHORTAGES[shortage], patch)
        requests = add(llm, jobs)
        finish(llm)
    check(stand, jobs, requests)
    assert engine.stats.memory_shortages > 0 and engine.stats.failed == engine.stats.failed_steps == 0
    reduced = engine.stats.memory_shortages
    while not rows.is_full:
        requests = add(llm, jobs)
        finish(llm)
        check(stand, jobs, requests)
    assert engine.stats.memory_shortages == reduced
    messages = [record.message for record in caplog.records if record.name == "stridelm.engine.engine"]
    starts = [message for message in messages if "ran out of memory" in message]
    ends = [message for message in messages if "rows again" in message]
    assert messages[0] == starts[0] and messages[-1] == ends[-1] and len(starts) == len(ends) <= reduced


@pytest.mark.parametrize("way", ["at once", "in flight"])
def test_a_request_that_never_finds_memory(stands: dict[str, Stand], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends alone once steps cannot be smaller."""
    stand = stands[way]
    llm, jobs = stand.llm(page_size=4), crowd(stand)
    requests = add(llm, jobs)
    forward = llm.engine.runner.forward

    def maybe(batch: ForwardBatch) -> Any:
        if any(span.request is requests[3] for span in batch.spans):
            of_a_gpu()
        return forward(batch)

    monkeypatch.setattr(llm.engine.runner, "forward", maybe)
    finish(llm)
    guilty = requests.pop(3)
    assert guilty.finish_reason == "error" and guilty.error == "OutOfMemoryError inside the engine"
    check(stand, [*jobs[:3], *jobs[4:]], requests)
    assert llm.engine.stats.failed == 1 and llm.engine.stats.memory_shortages > 0


@pytest.mark.parametrize("times", [1, 2])
def test_work_for_one_request(stands: dict[str, Stand], times: Literal[1, 2], monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no memory to admit a request, it is tried once more; a second time it ends, and the others go on."""
    stand = stands["at once"]
    llm, jobs = stand.llm(page_size=4), crowd(stand)
    requests = add(llm, jobs)
    admit, left = llm.engine.drafters.admit, [True] * times

    def maybe(request: Request) -> None:
        if request is requests[3] and left and left.pop():
            SHORTAGES["numpy"]()
        admit(request)

    monkeypatch.setattr(llm.engine.drafters, "admit", maybe)
    finish(llm)
    if times == 2:
        guilty = requests[3]
        assert guilty.finish_reason == "error" and "MemoryError inside the engine" in (guilty.error or "")
        requests, jobs = ([*each[:3], *each[4:]] for each in (requests, jobs))
    check(stand, jobs, requests)
    assert llm.engine.stats.failed == times - 1 and llm.engine.stats.memory_shortages == 1 and not left
