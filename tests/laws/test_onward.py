"""Rows whose last states nobody needs stop where the last entries are stored (run/onward.py). It shows in nothing but
the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import LLM, SamplingParams
from stridelm.attention import BACKENDS
from stridelm.attention.triton import TritonAttention
from stridelm.batch import Draft, ForwardBatch
from stridelm.engine.outcome import Outcome
from stridelm.models.layers.block import Block
from stridelm.run import eager
from stridelm.types import StepPlan
from support.checks.identity import mixed_jobs, teach
from support.doubles.bounds import BOUNDS, bounds_registered
from support.doubles.interpreter import INTERPRETED
from support.doubles.stand import Job, Stand, accepted, all_speculations, assert_same, speculation
from support.doubles.tree_drafter import NAME as TREE
from support.doubles.tree_drafter import registered
from support.oracles.models import VARIANTS

SHARED = VARIANTS["gemma4_text"]["shared-with-inputs"]
FREE = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PLAIN = {"drafter": "none"}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with registered(), bounds_registered():
        yield


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("gemma4_text", **SHARED), "float32")


class RowCounts:
    """Rows that run through each layer's MLP, step by step, and those of the whole step."""

    def __init__(self, llm: LLM) -> None:
        model = llm.engine.runner.model
        self.last, self.layers = model.last_storing, len(model.blocks)
        self.steps: list[dict[int, int]] = []
        model.register_forward_pre_hook(lambda _, args: self.steps.append({-1: len(args[0].ids_N)}))
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            block.mlp.register_forward_pre_hook(self._counter(layer))
        assert self.last + 1 < self.layers

    def _counter(self, layer: int) -> Callable[..., None]:
        return lambda _, args: self.steps[-1].update({layer: len(args[0])})

    def pairs(self) -> list[tuple[int, int]]:
        """Of each step, the rows before the last layer that stores entries, and those from its MLP on."""
        found = []
        for step in self.steps:
            rows = [step.get(layer, 0) for layer in range(-1, self.layers)]
            before, after = {*rows[: self.last + 1]}, {*rows[self.last + 1 :]}
            assert len(before) == len(after) == 1, step
            found.append((before.pop(), after.pop()))
        return found


@pytest.mark.parametrize("attention", ["auto", BOUNDS])
def test_rows_of_a_prompt_s_chunks_stop(stand: Stand, attention: str) -> None:
    """Of a chunk in the middle no row goes on, of the last one only the row that decides, beside those that decode."""
    llm = stand.llm(max_num_batched_tokens=16, attention=attention)
    prompt = list(range(1, 41))
    counts = RowCounts(llm)
    llm.generate([prompt], [replace(FREE, speculation=PLAIN)])
    assert counts.pairs()[:4] == [(16, 0), (16, 0), (8, 1), (1, 1)]
    counts.steps.clear()
    llm.generate([prompt[:4], prompt[::-1]], [replace(FREE, max_tokens=9, speculation=PLAIN)] * 2)
    assert counts.pairs()[:4] == [(16, 1), (16, 1), (14, 2), (2, 2)]


@pytest.mark.parametrize("drafter", ["frozen_kv", "medusa", "model", "mask", "ngram"])
def test_drafters_that_read_the_last_row_only(stand: Stand, drafter: str) -> None:
    llm = stand.llm(max_num_batched_tokens=16)
    counts = RowCounts(llm)
    llm.generate([list(range(1, 41))], [replace(FREE, speculation=speculation(stand, drafter))])
    (_, first), (_, second), (rows, third), *_ = counts.pairs()
    assert (first, second) == (0, 0)
    assert third == rows - 7


@pytest.mark.parametrize("drafter", ["eagle", "mtp", "hybrid"])
def test_drafters_that_fold_every_row(stand: Stand, drafter: str) -> None:
    """All rows of their requests go on, and of others' beside them only those that decide."""
    llm = stand.llm(max_num_batched_tokens=64)
    counts = RowCounts(llm)
    jobs = [Job(list(range(1, 21)), FREE, speculation(stand, drafter)), Job(list(range(1, 31)), FREE, PLAIN)]
    stand.run(jobs, llm)
    assert counts.pairs()[0] == (50, 21)


@pytest.mark.parametrize("wanted", [{"prompt_logprobs": 1}, {"return_hidden_states": True}])
def test_prompts_that_are_read(stand: Stand, wanted: dict[str, Any]) -> None:
    llm = stand.llm(max_num_batched_tokens=64)
    counts = RowCounts(llm)
    jobs = [Job(list(range(1, 21)), replace(FREE, **wanted), PLAIN), Job(list(range(1, 31)), FREE, PLAIN)]
    stand.run(jobs, llm)
    assert counts.pairs()[0] == (50, 21)


@INTERPRETED
@pytest.mark.parametrize("deterministic", [True, False])
def test_on_the_kernel(stand: Stand, deterministic: bool) -> None:
    """The kernel that serves on GPUs attends for the rows that go on as it does for all."""

    class Interpreted(TritonAttention):
        device = None  # type: ignore[assignment]

        def __init__(self, _: bool) -> None:
            super().__init__(deterministic)

    prompts = [list(range(1, 4)), list(range(1, 23))]
    jobs = [Job(prompt, replace(FREE, logprobs=1), speculation(stand, "frozen_kv")) for prompt in prompts]
    BACKENDS.add("interpreted", Interpreted)
    try:
        llm = stand.llm(max_num_batched_tokens=12, attention="interpreted")
    finally:
        BACKENDS.remove("interpreted")
    counts = RowCounts(llm)
    ours = stand.run(jobs, llm)
    assert counts.pairs()[:2] == [(12, 1), (12, 1)]
    llm.engine.device.narrows = False
    for got, wanted in zip(ours, stand.run(jobs, llm), strict=True):
        assert_same(got, wanted)


def test_models_that_share_nothing(checkpoint: Callable[..., Path]) -> None:
    """Their last layer stores entries, so every row has a last state."""
    llm = Stand(checkpoint("qwen3"), "float32").llm()
    seen: list[ForwardBatch] = []
    llm.engine.tracer = lambda plan, draft, batch, outcome: seen.append(batch)
    llm.generate([list(range(1, 41))], [replace(FREE, speculation=PLAIN)])
    assert seen and all(batch.whole is None for batch in seen)


class Drafts:
    """What was drafted after which tokens."""

    def __init__(self, llm: LLM) -> None:
        self.seen: dict[tuple[Any, ...], list[int]] = {}
        llm.engine.tracer = self

    def __call__(self, plan: StepPlan, draft: Draft, batch: ForwardBatch, outcome: Outcome) -> None:
        for row, span in enumerate(plan.spans):
            if span.draft:
                key = (*span.request.token_ids, span.request.speculation.drafter, span.depth, span.draft)
                self.seen[key] = draft.tokens[row][draft.valid[row]].tolist()


@pytest.mark.parametrize("attention", ["auto", "reference", BOUNDS])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_it_changes_nothing(stand: Stand, monkeypatch: pytest.MonkeyPatch, chunk: int, attention: str) -> None:
    """Tokens, log-probabilities, prompts' log-probabilities, hidden states and drafts are those of all rows going
    through all layers, and no state of a row that has stopped is read: they are not numbers here."""
    features = ["nothing", "logprobs", "hidden_states"]
    jobs = mixed_jobs(stand, 12, 1.0, features, seed=chunk)
    for job in jobs:
        if (job.speculation or {}).get("drafter") == TREE:
            teach(stand, job)
    jobs += [replace(job, speculation=kind) for job, kind in zip(jobs * 9, all_speculations(stand))]
    stopped: list[int] = []

    def spread(x_MH: torch.Tensor, rows_M: torch.Tensor | None, rows: int) -> torch.Tensor:
        if rows_M is None:
            return x_MH
        stopped.append(rows - len(rows_M))
        return x_MH.new_full((rows, x_MH.shape[1]), float("nan")).index_copy_(0, rows_M, x_MH)

    def run(narrows: bool) -> tuple[Any, dict[tuple[Any, ...], list[int]]]:
        llm = stand.llm(max_num_batched_tokens=chunk, attention=attention, enable_prefix_caching=False)
        llm.engine.device.narrows = narrows
        drafts = Drafts(llm)
        return stand.run(jobs, llm), drafts.seen

    monkeypatch.setattr(eager, "spread", spread)
    ours, drafted = run(True)
    assert sum(stopped) > 300
    stopped.clear()
    theirs, wanted = run(False)
    assert not stopped
    for got, other, job in zip(ours, theirs, jobs, strict=True):
        assert_same(got, other, job.speculation)
    assert drafted == wanted
    assert accepted(ours)
