"""How long a step takes: learnt from all steps that ran, and used by everybody who asks.

What decodes take is for decode_times.py to say. Prompt rows have a price of their own: a step with them takes what its
decodes would take alone, and a line over its prompt rows, which is fitted to the last few steps that had any. They are
kept as they were measured, so that the line follows what decodes are known to take by now. As long as no step of
decodes was measured, their rows count as prompt rows.

A step in which drafters catch up with earlier ones says nothing of any other, but what that took.

Legend: Q steps with prompt rows.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from collections import deque

import numpy as np

from stridelm.compiled import njit
from stridelm.schedule.counts import class_of
from stridelm.schedule.decode_times import AFTER_DECODES, AFTER_PROMPTS, LATE, OUTLIER, DecodeTimes
from stridelm.schedule.step_shape import StepShape

PROMPT_STEPS, PROMPT_MEMORY = 32, 0.95
"""Steps with prompt rows that are kept, and the weight of one relative to the next one's."""
FEW_PROMPTS = 4
"""Of them, before anything counts as an outlier."""
SPREAD = 0.1
"""Steps whose prompt rows deviate by less than this share of their mean say nothing of a base."""
CHEAPEST = 0.1
"""A prompt row takes at least this share of what rows take on average."""
BEHIND_MEMORY, LONGEST = 0.9, 8.0
"""Weight of a step in which drafters caught up relative to the next such one, and most steps that this is taken to be
worth: something else may have delayed it."""
CATCHING_UP = -1, False
"""Depth of a step in which drafters caught up, and whether it had prompt rows: unlike any other's."""
NEAR = 4
"""Stairs: a step tells of steps with up to twice or half as many requests."""


class StepCost:
    """Times in seconds. Not thread-safe."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._decodes = DecodeTimes()
        self._latest: tuple[int, bool] | None = None
        """The latest step's depth, and whether it had prompt rows."""
        self._first: dict[int, dict[int, tuple[StepShape, float]]] = {}
        """Class of requests -> depths that a step had with about as many -> the first such step, and what it took."""
        self._tried: dict[int, set[int]] = {}
        """Class of requests -> depths that were measured with about as many."""
        self._prompts: deque[tuple[int, int, int, int, int, float]] = deque(maxlen=PROMPT_STEPS)
        """The last steps with prompt rows."""
        self._behind = 1.0
        """Mean of what catching up took, in steps of as many requests that draft nothing."""
        self._line: tuple[float, float, float] | None = None
        """Seconds that any prompt rows add to a step, that each adds, and that each row of decodes takes if nothing is
        known of them. None: to be fitted."""

    def note(self, step: StepShape, seconds: float, tried: int | None = None) -> None:
        """A step took this long. tried: depth of the deepest draft whose depth was chosen, if any was.

        The first step that tries a depth, with about so many requests, says little: what it needs is loaded then. But
        if the second is like it and took longer by much, something else delayed that, and the first counts. A step that
        took no time says nothing: a clock's ticks may be longer than a step.
        """
        if step.behind:
            self._caught_up(step, seconds)
            self._latest = CATCHING_UP
            return
        kind = step.depth, step.prompt > 0
        before, self._latest = self._latest or kind, kind
        if tried is not None and self._is_first(step, tried, seconds):
            return
        if seconds <= 0.0:
            return
        second = None if tried in self._tried.get(class_of(step.requests), ()) else tried
        if second is not None:
            first, took = self._first[class_of(step.requests)][second]
            seconds = took if _are_alike(first, step) and seconds > LATE * took > 0.0 else seconds
        if step.prompt:
            if len(self._prompts) >= FEW_PROMPTS:
                seconds = min(seconds, OUTLIER * self.one(step))
            self._prompts.append((step.requests, step.rows, step.depth, step.context, step.prompt, seconds))
            self._line = None
        else:
            if not self._decodes:
                self._line = None
            self._decodes.note(step, seconds, AFTER_PROMPTS if before[1] else AFTER_DECODES if before != kind else 0)
        if second is not None:
            for near in _near(step.requests):
                self._tried.setdefault(near, set()).add(second)

    def untried(self, requests: int, deepest: int) -> int | None:
        """The largest depth that was not measured with about so many requests; None if each was."""
        tried = self._tried.get(class_of(requests), ())
        return next((depth for depth in range(deepest, -1, -1) if depth not in tried), None)

    @property
    def knows_decodes(self) -> bool:
        """Whether any step without prompt rows has been noted."""
        return bool(self._decodes)

    @property
    def switching(self) -> float:
        """By what share a step takes longer that comes after one of another depth."""
        return self._decodes.switching

    @property
    def knows_switching(self) -> bool:
        """Whether it is known by what share a plain step takes longer that comes after one that drafts."""
        return self._decodes.knows_switching

    @property
    def catching_up(self) -> float:
        """What it takes drafters to catch up with what they left to a later step, in steps that draft nothing."""
        return max(1.0, self._behind)

    @property
    def knows_prompts(self) -> bool:
        """Whether any step with prompt rows has been noted."""
        return bool(self._prompts)

    def one(self, step: StepShape) -> float:
        """Predicted time of a step. Some step of its kind must have been noted."""
        decodes = self._without_prompts(step)
        if not step.prompt:
            return decodes
        base, each, _ = self._fitted()
        return decodes + base + each * step.prompt

    def prompt_rows(self, beside: StepShape, seconds: float) -> int:
        """The most prompt rows with which a step with these decodes is expected to take at most this long."""
        base, each, _ = self._fitted()
        return max(0, int((seconds - self._without_prompts(beside) - base) / each))

    def seconds(self, requests: int, rows: np.ndarray, depths: np.ndarray, context: int) -> np.ndarray:
        """Predicted times of steps of so many requests after so many tokens, with these numbers of rows and depths:
        arrays of one shape. Some step without prompt rows must have been noted."""
        return self._decodes.of(_table(requests, rows.ravel(), depths.ravel(), context)).reshape(rows.shape)

    def doubts(self, requests: int, rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Standard deviations of what is known of such steps' times, as shares of these; without what is not known of
        the machine's speed, which they have in common."""
        return self._decodes.doubts(_table(requests, rows, depths, context=0))

    def _is_first(self, step: StepShape, depth: int, seconds: float) -> bool:
        """Whether the step is the first that tries a depth with about so many requests."""
        if depth in self._first.get(class_of(step.requests), ()):
            return False
        for near in _near(step.requests):
            self._first.setdefault(near, {}).setdefault(depth, (step, seconds))
        return True

    def _caught_up(self, step: StepShape, seconds: float) -> None:
        if step.requests and self.knows_decodes and (self.knows_prompts or not step.prompt):
            plain = self._without_prompts(StepShape(step.requests, step.requests, 0, step.context))
            took = min(max(0.0, seconds - self.one(step)) / plain, LONGEST)
            self._behind += (1.0 - BEHIND_MEMORY) * (took - self._behind)

    def _without_prompts(self, step: StepShape) -> float:
        """Of the step without its prompt rows."""
        if not self._decodes:
            return self._fitted()[2] * step.rows
        steps_14 = np.array([[step.requests, step.rows, step.depth, step.context]], dtype=np.float64)
        return float(self._decodes.of(steps_14)[0])

    def _fitted(self) -> tuple[float, float, float]:
        if self._line is None:
            steps_Q6 = np.array(self._prompts, dtype=np.float64)
            known = bool(self._decodes)
            decodes_Q = self._decodes.of(steps_Q6[:, :4].copy()) if known else np.zeros(len(steps_Q6))
            base, each = _fit_line(steps_Q6, decodes_Q, known)
            self._line = base, each, 0.0 if known else each
        return self._line


def _table(requests: int, rows_N: np.ndarray, depths_N: np.ndarray, context: int) -> np.ndarray:
    """[N, 4] as `DecodeTimes` reads steps."""
    steps_N4 = np.empty((len(rows_N), 4))
    steps_N4[:, 0], steps_N4[:, 1], steps_N4[:, 2], steps_N4[:, 3] = requests, rows_N, depths_N, context
    return steps_N4


def _are_alike(one: StepShape, other: StepShape) -> bool:
    """Whether two steps of one depth have about as many requests and rows, and as many of a prompt."""
    same_counts = class_of(one.requests) == class_of(other.requests) and class_of(one.rows) == class_of(other.rows)
    return same_counts and one.prompt == other.prompt


def _near(requests: int) -> range:
    """The classes of up to twice or half as many requests."""
    return range(class_of(requests) - NEAR, class_of(requests) + NEAR + 1)


@njit()
def _fit_line(steps_Q6, decodes_Q, known):
    """(seconds that any prompt rows add to a step, seconds that each adds): least squares of relative errors, and
    neither below zero. steps_Q6: requests, rows, depth, context, prompt rows, seconds. decodes_Q: what their decodes
    take, if that is known; otherwise their rows count."""
    total, x, y, xx, xy, rows, took = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for q in range(len(steps_Q6)):
        prompt, seconds = steps_Q6[q, 4], steps_Q6[q, 5]
        more = prompt if known else prompt + steps_Q6[q, 1]
        weight = PROMPT_MEMORY ** (len(steps_Q6) - 1 - q) / seconds**2
        longer = seconds - decodes_Q[q]
        total, x, y = total + weight, x + weight * more, y + weight * longer
        xx, xy = xx + weight * more * more, xy + weight * more * longer
        rows, took = rows + weight * (prompt + steps_Q6[q, 1]), took + weight * seconds
    x, y, xx, xy = x / total, y / total, xx / total, xy / total
    cheapest = CHEAPEST * took / rows
    spread = xx - x * x
    each = (xy - x * y) / spread if spread > (SPREAD * x) ** 2 else 0.0
    base = y - each * x
    if each < cheapest or base < 0.0:  # all that they add is taken to be the rows' own
        return 0.0, max(cheapest, xy / xx)
    return base, each
