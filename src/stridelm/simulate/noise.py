"""A clock that is off: how long a policy takes steps to be on a machine that others use too.

What is told of a step is its true time times exp(x), and x is a sum of what is seen on such a machine:

- a slow and a fast drift: two Ornstein-Uhlenbeck processes in time, as neighbours come and go and caches fill;
- an error of each step by itself;
- now and then a delay.

Only what is told is off. Steps take what they take, so that policies are compared without a luckier clock among them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

DRIFTS = ((4.0, 0.12), (0.08, 0.06))
"""Seconds over which each is correlated, and its standard deviation at level 1."""
ERROR = 0.04
"""Standard deviation of each step's own."""
DELAYED, DELAY = 0.12, 0.15
"""Share of steps that are delayed, and the mean of what that adds to x at level 1."""


@dataclass
class Noise:
    """level: 1 is two cores of a shared server, with steps of 2 ms; 0 is a true clock."""

    level: float = 0.0
    seed: int = 0
    _drifts: list[float] = field(init=False, default_factory=lambda: [0.0] * len(DRIFTS))

    def __post_init__(self) -> None:
        self._random = random.Random(f"noise {self.seed}")

    def __call__(self, seconds: float) -> float:
        """What is told of a step that takes so long. To be asked for each step in turn."""
        if not self.level:
            return seconds
        draw = self._random
        for place, (correlated, deviation) in enumerate(DRIFTS):
            kept = math.exp(-seconds / correlated)
            self._drifts[place] = kept * self._drifts[place] + draw.gauss(0, deviation * math.sqrt(1 - kept**2))
        late = draw.expovariate(1 / DELAY) if draw.random() < DELAYED else 0.0
        return seconds * math.exp(self.level * (sum(self._drifts) + draw.gauss(0, ERROR) + late))
