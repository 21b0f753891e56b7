"""Compares an engine's drafts with what an oracle drafts from the tokens alone; and planners that vary the steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stridelm import LLM, SamplingParams
from stridelm.batch import Draft, ForwardBatch
from stridelm.engine.outcome import Outcome
from stridelm.schedule import planner
from stridelm.schedule.step_budget import Allocation, StepBudget
from stridelm.types import Span, StepPlan
from support.doubles.depths import RandomDepths
from support.oracles.heads import Drafted

CLOSE = 1e-2
"""A guess with a smaller lead over the second best may fall either way."""
VOCAB = 5
"""So small that random guesses are accepted now and then."""


class Watch:
    """Raises AssertionError at the first draft that differs from the oracle's, or that is missing when expected."""

    def __init__(
        self,
        llm: LLM,
        oracle: Callable[[list[int], list[int]], Drafted],
        expected: Callable[[Span], bool] | None = None,
    ) -> None:
        """oracle: the draft after the known tokens, each guess following the given guesses before it."""
        self._oracle = oracle
        self._expected = expected
        self.checked = self.accepted = self.missed = 0
        """Drafts compared with the oracle; guesses accepted, guesses rejected."""
        llm.engine.tracer = self

    def __call__(self, plan: StepPlan, draft: Draft, batch: ForwardBatch, outcome: Outcome) -> None:
        for row, span in enumerate(plan.spans):
            if not span.draft:
                continue
            valid = int(draft.valid[row].sum())
            if self._expected is not None:
                assert valid == (span.draft if self._expected(span) else 0), (span.request.id, span)
            if not valid:
                continue
            drafted = draft.tokens[row, :valid].tolist()
            wanted = self._oracle(span.request.token_ids, drafted)
            if wanted.margin > CLOSE:
                assert drafted == wanted.tokens, (span.request.id, span)
                self.checked += 1
            self.accepted += outcome.accepted[row]
            self.missed += outcome.drafted[row] - outcome.accepted[row]


def engine(model: object, **options: Any) -> LLM:
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "strict": True, "page_size": 4}
    pages = max(40, 480 // options.get("page_size", 4))
    return LLM(str(model), **{**settings, "num_pages": pages, **options})


def prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def continued(jobs: Sequence[list[int]], said: Sequence[list[int]]) -> list[list[int]]:
    """Prompts that continue earlier ones with their output, and one that departs from such an output in the middle."""
    return [job + tokens[:13] for job, tokens in zip(jobs, said)] + [jobs[0] + [(t + 1) % VOCAB for t in said[0][:3]]]


def check_cold_and_warm(llm: LLM, seen: Watch, params: Callable[[int], list[SamplingParams]]) -> None:
    """Every draft is the oracle's, on an empty cache and after prefix hits. params: for a number of requests."""
    jobs = prompts(3)
    said = [output.outputs[0].token_ids for output in llm.generate(jobs, params(3))]
    longer = continued(jobs, said)
    outputs = llm.generate(longer, params(len(longer)))
    assert any(o.metrics is not None and o.metrics.cached_tokens > 0 for o in outputs)
    assert seen.checked > 30 and seen.accepted > 0 and seen.missed > 0
    llm.check()


def check_short_of_pages(llm: LLM, seen: Watch, params: list[SamplingParams], short: bool) -> None:
    """Every draft is the oracle's, and requests are preempted if pages are short. params: of five requests."""
    llm.generate([job[:6] for job in prompts(5, seed=1)], params)
    assert seen.checked > 15 and (llm.engine.stats.preemptions > 0) == short
    llm.check()


def cut_prompts(patch: pytest.MonkeyPatch, chunk: int) -> None:
    """From now on no span has more real rows than `chunk`; unlike with a row budget, drafts still fit."""
    most_real = StepBudget.most_real

    def few(purse: StepBudget, grant: Allocation, wanted: int) -> int:
        return min(most_real(purse, grant, wanted), max(grant.real, chunk))

    patch.setattr(StepBudget, "most_real", few)


def vary_depths(patch: pytest.MonkeyPatch, seed: int = 5) -> None:
    """From now on new engines use a policy that gives every span any depth that its request can run."""
    patch.setattr(planner, "Configured", lambda: RandomDepths(seed))
