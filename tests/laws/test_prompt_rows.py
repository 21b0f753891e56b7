"""How many rows prompts get beside decodes changes when tokens come, and never which."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.schedule import planner
from stridelm.schedule.step_shape import StepShape
from stridelm.types import StepPlan
from support.checks.identity import prompts
from support.doubles.prompt_rows import AtMostRows, RandomRows
from support.doubles.stand import Job, Stand, assert_same, speculation


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_outputs_are_the_same(stand: Stand, drafter: str) -> None:
    """Sixteen requests with room for five at once, so that prompts keep arriving beside decodes."""
    kind = speculation(stand, drafter)
    rng = random.Random(2)
    jobs = [
        Job(
            rng.choices(range(60), k=rng.randint(1, 50)),
            SamplingParams(temperature=float(i % 2), seed=i, max_tokens=3 + i % 7, ignore_eos=True),
            kind,
        )
        for i in range(16)
    ]
    llm = stand.llm(max_num_seqs=5)
    llm.engine.steps.planner.prompts = RandomRows()
    for job, output in zip(jobs, stand.run(jobs, llm), strict=True):
        assert_same(output, stand.plain(job.prompt, job.params), drafter)


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "none"])
def test_a_draft_where_a_prompt_ends_has_rows_if_there_can_be_one(
    stand: Stand, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that says that it needs a step's states has nothing even if there is room, so it gets none. One that
    drafts with another has what needs no states, but gets no rows for that alone."""
    if DRAFTERS.get(drafter).why_not(stand.target) is not None:
        pytest.skip("the stand has no weights for it")
    needs_states, guesses = DRAFTERS.get(drafter).needs_states, []
    has_partner = DRAFTERS.get(drafter).weights_of(stand.target) not in (None, drafter)
    for room in (False, True):
        if room:
            monkeypatch.setattr(planner, "is_unseen", lambda *_: False)
        engine = stand.llm(drafter=drafter, enable_prefix_caching=False).engine
        engine.tracer = lambda plan, draft, *_: guesses.append((plan.spans[0].draft, bool(draft.valid.any())))
        engine.add("prompt", [5, 6, 7, 8, 6, 7, 8, 6], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        engine.step()
        engine.abort("prompt")
    (rows, _), (most, guessed) = guesses
    assert most and (rows, guessed) == ((0, has_partner) if needs_states else (most, True))


def test_a_stream_is_not_held_up_by_a_prompt(stand: Stand) -> None:
    """No step beside a decode has more prompt rows than the policy allows, and the stream emits at each of them."""
    llm = stand.llm()
    engine, policy = llm.engine, AtMostRows(6)
    engine.steps.planner.prompts = policy
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plans: list[StepPlan] = []
    engine.tracer = lambda plan, *_: plans.append(plan)
    stream = engine.add("stream", [1, 2, 3], params)
    engine.step()
    engine.add("prompt", list(range(1, 60)), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    while engine.busy:
        engine.step()
    beside = [plan for plan in plans if len(plan.spans) == 2 and plan.spans[1].start < 59]
    assert len(beside) == -(-59 // 7), "six rows and the smallest span of a running request"
    assert all(plan.spans[0].request is stream and plan.spans[1].real <= 7 for plan in beside)


def test_what_prompts_cost_is_learnt_from_steps(stand: Stand) -> None:
    llm = stand.llm(itl_target_ms=25)
    known = [llm.engine.cost.knows_prompts]
    llm.generate([prompts(stand, 1)[0]], SamplingParams(max_tokens=3))
    known.append(llm.engine.cost.knows_prompts)
    assert known == [False, True] and llm.engine.cost.one(StepShape(0, 0, 0, 0, 100)) > 0


def test_zero_is_no_limit(stand: Stand) -> None:
    planner = stand.llm(itl_target_ms=0).engine.steps.planner
    assert planner.prompts.rows(StepShape(8, 8, 0, 0), 0) == float("inf")


@pytest.mark.parametrize("value", [-1, "fast", float("nan")])
def test_a_target_is_a_number_of_milliseconds(stand: Stand, value: object) -> None:
    with pytest.raises(ValueError, match="itl_target_ms"):
        stand.llm(itl_target_ms=value)
