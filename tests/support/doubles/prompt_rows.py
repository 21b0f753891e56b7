"""Policies for prompts beside decodes that no engine ships: they move borders of chunks and change no token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from stridelm.schedule.step_shape import StepShape


@dataclass
class AtMostRows:
    """Always the same number of rows. Records what it was asked."""

    answer: float
    asked: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def rows(self, beside: StepShape, waiting: int) -> float:
        self.asked.append(beside.rows)
        self.waiting.append(waiting)
        return self.answer


@dataclass
class RandomRows:
    """A few rows, another number at every step."""

    seed: int = 5
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def rows(self, beside: StepShape, waiting: int) -> float:
        return self._draw.randint(1, 12)
