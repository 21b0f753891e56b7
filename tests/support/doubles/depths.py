"""Depth policies that no engine ships: they may change how fast tokens come, but never which."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from stridelm.types import Request


@dataclass
class RandomDepths:
    """Any depth that the request can run, often 0."""

    seed: int = 5
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def depth(self, request: Request) -> int:
        return self._draw.choice((0, 0, *range(len(request.rows_by_depth))))


@dataclass
class AtMost:
    """As deep as the request asks for, and no deeper than `levels`."""

    levels: int

    def depth(self, request: Request) -> int:
        return min(self.levels, len(request.rows_by_depth) - 1)
