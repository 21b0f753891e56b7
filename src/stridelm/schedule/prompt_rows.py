"""How many prompt rows a step may have while other requests decode, so that none of them waits long for a token.

A policy sees only what the step has beside them, how many wait, and what earlier steps took. Its answer moves the
borders between the chunks of a prompt, which no output depends on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from stridelm.schedule.step_shape import StepShape

if TYPE_CHECKING:
    from stridelm.schedule.step_cost import StepCost

PATIENCE = 0.2
"""Seconds that prompts may take to be read at the target, before steps become longer."""
LONGEST = 2.0
"""Targets that a step may take, however many prompt rows wait."""


class PromptPolicy(Protocol):
    """Called while a plan is made; must not change state that another call would see."""

    def rows(self, beside: StepShape, waiting: int) -> float:
        """Maximum prompt rows of a step beside these decodes, at least 1. waiting: prompt rows that requests with a
        slot still want, or could have one for. Not called if nobody decodes: prompts then take all rows of the step."""
        ...


class Unbounded:
    """As many as the step has."""

    def rows(self, beside: StepShape, waiting: int) -> float:
        return math.inf


def within(itl_target_ms: float, cost: StepCost) -> PromptPolicy:
    """What holds steps to this many milliseconds, by what they cost; 0: nothing does."""
    return Timed(cost, itl_target_ms / 1e3) if itl_target_ms else Unbounded()


class Timed:
    """As many as are expected to fit into `target` seconds, or into twice the time of the shortest step that runs
    prompts at all, whichever is more: splitting prompts further would cost more time than it spares.

    If so many rows wait that reading them in such steps would take longer than PATIENCE, the target grows as many times
    as that is too long, up to LONGEST times: the more wait, the more it costs all of them that each step begins anew.
    Where decodes alone make steps longer than that, it changes nothing. The bound falls with the queue, so it does not
    swing."""

    def __init__(self, cost: StepCost, target: float) -> None:
        self._cost, self._target = cost, target

    def rows(self, beside: StepShape, waiting: int) -> float:
        cost = self._cost
        if not cost.knows_prompts:
            return math.inf
        seconds = max(self._target, 2 * cost.one(beside.with_prompt(1)))
        rows = max(1, cost.prompt_rows(beside, seconds))
        longest = self._target * min(LONGEST, waiting / rows * seconds / PATIENCE)
        return rows if longest <= seconds else max(1, cost.prompt_rows(beside, longest))
