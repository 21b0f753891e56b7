"""Choices of depths, for about how many requests each stands, and when a depth beside it is tried (adaptive.py).

What is not chosen is not learnt about, so now and then a step probes a depth. Probes become rare while they change
nothing; but as long as it is not known whether the depth is faster, only as rare as they are dear: one that loses
little is worth repeating. They become frequent again when one changes something. Of shallower depths only times are
unknown, since deeper drafts tell how their levels fare: one that is known to be slower is probed rarely from the start.

Legend: D levels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stridelm.schedule.counts import stair
from stridelm.schedule.depth_loops import NEVER

SOONEST, LATEST, AGAIN = 8, 512, 4
"""Steps between two probes, and by what they are divided when one changes something."""
DEAR = 0.008
"""Share of the time that may be lost to probes, as long as they tell anything."""


@dataclass(frozen=True)
class Chosen:
    """A choice, and for how many requests it was made."""

    requests: int
    depth: int
    least: float
    """Chance that a level reaches to be drafted."""
    rows: int = NEVER
    """Of a step, as padded."""
    prices_D: np.ndarray | None = None
    """[D + 1] what is lost when a step probes each depth, in steps: it is slower, so are it and the step after it for
    being of another kind, and drafters catch up after a step in which nothing was drafted. None: nothing is known."""
    slower_D: np.ndarray | None = None
    """[D + 1] whether it is known that steps are slower in which all draft to each depth."""

    def is_for(self, count: int) -> bool:
        return are_about_as_many(self.requests, count)

    def is_slower(self, depth: int) -> bool:
        """Whether it is known that steps are in which all draft to it."""
        return self.slower_D is not None and bool(self.slower_D[depth])


def are_about_as_many(one: int, other: int) -> bool:
    fewer, more = min(one, other), max(one, other)
    return more <= fewer + max(1, fewer // 4)


DEEPEST = Chosen(0, 1 << 30, 0.0)
"""All levels."""


@dataclass
class Load:
    """What is done at about one number of requests."""

    chosen: Chosen
    """Last, when there were as many."""
    unprobed: int = 0
    """Steps since the last probe."""
    interval: int = SOONEST
    steps: int = 0
    """That have landed."""
    probed: dict[int, int] = field(default_factory=dict)
    """Depth -> how many steps had landed when it was last probed."""
    awaited: int | None = None
    """The depth that a step probes which has not landed: the next one is decided on before."""
    again: int = 0
    """How many further steps are to probe it, one after another."""
    landing: int = 0
    """How many steps that probe it have not landed."""
    judged: bool = True
    """Whether a choice was made since a probe landed that was to find out whether the one before is still right."""

    def begin(self, steps: int) -> None:
        """So many steps in a row are to probe a depth."""
        self.again, self.landing = steps - 1, steps

    def land(self, depth: int, judged: bool) -> bool:
        """A step that probed this depth has landed. Returns whether it was the last one."""
        self.landing -= 1
        if self.landing > 0:
            return False
        self.awaited, self.unprobed, self.judged, self.probed[depth] = None, 0, judged, self.steps
        return True

    def count(self) -> None:
        """A step has landed."""
        self.steps += 1
        self.unprobed += 1

    def due(self, chosen: Chosen, deepest: int) -> int | None:
        """The depth to be probed next, if any: of the one above what is chosen, the one below and plain decoding, that
        which was not probed for longest. What is found beside the choice tells of depths beyond, too, but not of steps
        that draft nothing."""
        at = min(chosen.depth, deepest)
        beside = [depth for depth in (at + 1, at - 1, 0) if 0 <= depth <= deepest and depth != at]
        worth = [depth for depth in beside if depth > at or not chosen.is_slower(depth) or self._was_long_ago(depth)]
        return min(worth, key=lambda depth: self.probed.get(depth, -1), default=None)

    def judge(self, before: int) -> bool:
        """After a choice: say when to probe again, if a probe has landed since the one before. Returns whether one has
        and nothing changed.

        before: the depth of the choice before."""
        if self.judged:
            return False
        self.judged = True
        if self.chosen.depth != before:
            self.interval = max(SOONEST, self.interval // AGAIN)
            return False
        self.interval = min(2 * self.interval, self._latest())
        return True

    def _latest(self) -> int:
        """Steps after which to probe, at most: if it is to tell something, as many as make up for its price."""
        prices_D = self.chosen.prices_D
        if prices_D is None:
            return LATEST
        due = self.due(self.chosen, len(prices_D) - 1)
        if due is None or self.chosen.is_slower(due):
            return LATEST
        return int(min(LATEST, max(SOONEST, prices_D[due] / DEAR)))

    def _was_long_ago(self, depth: int) -> bool:
        """That it was probed."""
        return self.steps - self.probed.get(depth, 0) >= LATEST


class Loads:
    """By number of requests, as a stair."""

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}

    def at(self, count: int, latest: Chosen) -> Load:
        """latest: the choice to begin with where nothing is known."""
        place = stair(count)
        if place not in self._loads:
            self._loads[place] = Load(latest)
        return self._loads[place]

    def spread(self, load: Load) -> None:
        """A probe there changed nothing: with somewhat more and fewer requests the next one may be as far away, if the
        same is done. Otherwise each number would be probed for itself, while requests come and go."""
        here = load.chosen.requests
        for there, other in self._loads.items():
            if other.chosen.depth == load.chosen.depth and 2 * max(here, there) <= 3 * min(here, there):
                other.unprobed, other.interval = 0, max(other.interval, load.interval)
