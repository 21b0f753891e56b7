"""Depth policies that no engine ships: they may change how fast tokens come, but never which."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from stridelm.schedule.depth import NOBODY, Configured, Others
from stridelm.types import Request


@dataclass
class RandomDepths(Configured):
    """Any depth that the request can run, often 0."""

    seed: int = 5
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def drafts(self, requests: int) -> bool:
        return self._draw.random() < 0.5

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [self._draw.choice((0, 0, *range(len(request.rows_by_depth)))) for request in requests]


class ByLength(Configured):
    """Any depth that the request can run, the same whenever it has emitted as many tokens."""

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [len(each.output_ids) * 7 % 5 % len(each.rows_by_depth) for each in requests]


@dataclass
class AtMost(Configured):
    """As deep as the request asks for, and no deeper than `levels`."""

    levels: int

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [min(self.levels, len(request.rows_by_depth) - 1) for request in requests]
