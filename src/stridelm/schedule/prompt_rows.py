"""How many prompt rows a step may have while other requests decode, so that none of them waits long for a token.

A policy sees only numbers of rows and what earlier steps took. Its answer moves the borders between the chunks of a
prompt, which no output depends on.
"""

from __future__ import annotations

import math
from typing import Protocol

from stridelm.schedule.step_cost import StepCost


class PromptPolicy(Protocol):
    """Called while a plan is made; must not change state that another call would see."""

    def rows(self, decoding: int) -> float:
        """Maximum prompt rows of a step in which other requests have `decoding` rows, at least 1. Not called if nobody
        decodes: prompts then take all rows of the step."""
        ...


class Unbounded:
    """As many as the step has."""

    def rows(self, decoding: int) -> float:
        return math.inf


class Timed:
    """As many as are expected to fit into `target` seconds, or into twice the time of the shortest step that runs
    prompts at all, whichever is more: splitting prompts further would cost more time than it spares."""

    def __init__(self, cost: StepCost, target: float) -> None:
        self._cost, self._target = cost, target

    def rows(self, decoding: int) -> float:
        if not self._cost.known:
            return math.inf
        shortest = self._cost.seconds(decoding + 1)
        return max(1, self._cost.rows(max(self._target, 2 * shortest)) - decoding)
