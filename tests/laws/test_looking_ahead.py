"""Where a step lands before the next is planned, drafters that look things up are asked first what they have found:
rows are planned for that alone, and all of them are drafted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from stridelm import SamplingParams
from stridelm.batch import Draft, ForwardBatch
from stridelm.draft import DRAFTERS
from stridelm.draft.base import Drafter
from stridelm.engine.outcome import Outcome
from stridelm.run.state import TokenTable
from stridelm.types import Found, Request, StepPlan
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.stand import Stand

LOOKING = [name for name in DRAFTERS if DRAFTERS.get(name).looks_ahead]
DEPTH = 4


@pytest.fixture(scope="module")
def stands(checkpoint: Callable[..., Path]) -> Iterator[dict[str, Stand]]:
    path = checkpoint("qwen3", tie_word_embeddings=True)
    with bounds_registered():
        yield {"at once": Stand(path, "float32"), "in flight": LaggingStand(path, "float32")}


def served(
    stand: Stand, drafter: str, depth: int | str, others: str | None = None
) -> list[tuple[StepPlan, Draft, list[Found | None]]]:
    """Steps, and what was found for each of their spans. One of the requests has a prompt that repeats nothing."""
    engine = stand.llm(drafter=drafter, depth=depth, page_size=4, max_num_seqs=4).engine
    steps: list[tuple[StepPlan, Draft, list[Found | None]]] = []

    def watch(plan: StepPlan, draft: Draft, batch: ForwardBatch, outcome: Outcome) -> None:
        steps.append((plan, draft, [span.request.found for span in plan.spans]))

    engine.tracer = watch
    for name, prompt in enumerate(([5, 6, 7] * 4, [7, 8] * 5 + [9, 7, 8], [3, 1, 4, 15, 9, 2, 6])):
        speculation = None if others is None or name else {"drafter": others}
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, speculation=speculation)
        engine.add(str(name), prompt, params)
    while engine.busy:
        engine.step()
    engine.check()
    return steps


@pytest.mark.parametrize("depth", [DEPTH, "auto"])
@pytest.mark.parametrize("drafter", LOOKING)
def test_rows_are_those_that_were_found(stands: dict[str, Stand], drafter: str, depth: int | str) -> None:
    drafted, empty = 0, 0
    for plan, draft, found in served(stands["at once"], drafter, depth):
        for place, (span, of_span) in enumerate(zip(plan.spans, found, strict=True)):
            rows = int(draft.valid[place].sum()) if draft.width else 0
            # A tree that has to do with fewer rows may be another one.
            may_be_less = depth == "auto" and DRAFTERS.get(drafter).branches
            if of_span is None:
                assert span.real > 1, "nobody looked, and no prompt ends"
                continue
            assert rows == span.draft or (may_be_less and rows < span.draft), "rows were planned for nothing"
            assert span.depth <= of_span.levels
            drafted += rows
            empty += span.decides and not rows
    assert drafted > 3 and empty > 3


@pytest.mark.parametrize("drafter", LOOKING)
def test_beside_requests_of_another_drafter(stands: dict[str, Stand], drafter: str) -> None:
    """Drafts of several drafters are merged into one."""
    other = next(name for name in (*LOOKING, "none") if name != drafter)
    for plan, draft, _ in served(stands["at once"], drafter, DEPTH, others=other):
        rows = draft.valid.sum(1).tolist() if draft.width else [0] * len(plan.spans)
        decoding = [place for place, span in enumerate(plan.spans) if span.real == 1]
        assert [rows[place] for place in decoding] == [plan.spans[place].draft for place in decoding]


@pytest.mark.parametrize("drafter", LOOKING)
def test_not_while_steps_are_in_flight(stands: dict[str, Stand], drafter: str) -> None:
    """There the host does not know the last tokens when it plans."""
    steps = served(stands["in flight"], drafter, DEPTH)
    assert all(each is None for _, _, found in steps for each in found)
    assert any(span.draft == DEPTH for plan, _, _ in steps for span in plan.spans)


@pytest.mark.parametrize("drafter", LOOKING)
def test_what_is_found_is_what_is_proposed(stands: dict[str, Stand], drafter: str) -> None:
    """Of a request that goes on after others left, in another slot or with the same neighbours."""
    engine = stands["at once"].llm(drafter=drafter, depth=DEPTH, page_size=4, max_num_seqs=2).engine
    mismatched: list[str] = []

    def watch(plan: StepPlan, draft: Draft, batch: ForwardBatch, outcome: Outcome) -> None:
        for place, span in enumerate(plan.spans):
            if span.real == 1 and draft.width and int(draft.valid[place].sum()) != span.draft:
                mismatched.append(span.request.id)

    engine.tracer = watch
    rng = torch.Generator().manual_seed(0)
    for name in range(7):
        length = int(torch.randint(2, 6, (), generator=rng))
        prompt = torch.randint(1, 9, (length,), generator=rng).tolist() * 3
        params = SamplingParams(temperature=1.0, seed=name, max_tokens=6 + 3 * name, ignore_eos=True)
        engine.add(str(name), prompt, params)
    while engine.busy:
        engine.step()
    engine.check()
    assert not mismatched


@pytest.mark.parametrize("drafter", LOOKING)
def test_a_request_that_cannot_be_looked_for_ends_alone(
    stands: dict[str, Stand], drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand, kind = stands["at once"], DRAFTERS.get(drafter)
    look = kind.found

    def maybe(self: Drafter, requests: Sequence[Request], table: TokenTable) -> Sequence[Found]:
        if any(request.id == "1" and len(request.output_ids) > 2 for request in requests):
            raise ArithmeticError("planted")
        return look(self, requests, table)

    monkeypatch.setattr(kind, "found", maybe)
    engine = stand.llm(drafter=drafter, depth=DEPTH, page_size=4, max_num_seqs=4).engine
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7] * 4, [7, 8] * 5, [3, 1, 4, 1, 5]]
    requests = [engine.add(str(place), prompt, params) for place, prompt in enumerate(prompts)]
    while engine.busy:
        engine.step()
    engine.check()
    for place, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        wanted = stand.plain(prompt, params).outputs[0].token_ids
        if place == 1:
            assert request.finish_reason == "error" and request.error == "ArithmeticError inside the engine"
            assert 2 < len(request.output_ids) < 12 and request.output_ids == wanted[: len(request.output_ids)]
        else:
            assert request.output_ids == wanted
