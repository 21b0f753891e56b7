"""Depths that make the most tokens per second: from learnt chances of acceptance and measured times of steps.

A step of R requests that verifies n draft rows, drafted to depth D, emits R + (the chances of those rows) tokens and
takes `seconds(R, R + n, D)`. Rows are chosen in order of their chances, over all requests, so a choice is a depth D and
a least chance: a request drafts as many levels as reach it. Of all choices the one with the highest rate is taken, and
depth 0 is a choice like any other.

What is not chosen is not learnt about, so now and then a step probes another depth. Probes become rare while they
change nothing, and frequent again when one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stridelm.schedule.acceptance import Acceptance
from stridelm.schedule.decode_cost import DecodeCost, stair
from stridelm.types import Request, Span

LEAST = np.array([1e-9, 0.02, 0.04, 0.07, 0.1, 0.14, 0.19, 0.25, 0.32, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
"""Least chances that are considered."""
SOONEST, LATEST = 8, 512
"""Steps between two probes."""
PAUSE = 8
"""Steps between two choices."""


@dataclass
class _Load:
    """What is done at about one number of requests."""

    choice: tuple[int, float] = (0, 1.0)
    """Depth and least chance."""
    pause: int = 0
    """Steps since the choice was made."""
    unprobed: int = 0
    """Steps since the last probe."""
    interval: int = SOONEST
    probed: list[int] = field(default_factory=list)
    """Depths, the one probed last at the end."""

    def knows(self, deepest: int) -> bool:
        """Whether each depth has been tried."""
        return set(range(deepest + 1)) <= set(self.probed)

    def probe(self, deepest: int) -> int | None:
        """The depth to be probed now, if any: first each once, the deepest first, then the one that was longest ago."""
        if not self.knows(deepest):
            return next(depth for depth in range(deepest, -1, -1) if depth not in self.probed)
        due = self.unprobed + 1 >= self.interval
        return next(depth for depth in self.probed if depth <= deepest) if due else None


class Adaptive:
    """Requests of one step share its cost, so their depths are chosen together. Those that are not adaptive keep their
    own depth, and count."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.acceptance = Acceptance()
        self.cost = DecodeCost()
        self._loads: dict[int, _Load] = {}
        """Number of requests, as a stair -> what is done."""

    def depths(self, requests: Sequence[Request]) -> Sequence[int]:
        own = [len(request.rows_by_depth) - 1 for request in requests]
        deepest = _deepest(requests)
        if not deepest:
            return own
        load = self._loads.get(stair(len(requests))) or _Load()
        probe = load.probe(deepest)
        if probe is not None:
            chosen = [min(probe, depth) for depth in own]
        else:
            depth, least = load.choice
            chosen = (self.acceptance.chances(requests, deepest)[:, :depth] >= least).sum(1).tolist()
        if all(request.adaptive for request in requests):
            return chosen
        return [best if request.adaptive else depth for request, depth, best in zip(requests, own, chosen, strict=True)]

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float | None) -> None:
        ours = [place for place, span in enumerate(spans) if span.decides and not span.request.all_or_nothing]
        requests = [spans[place].request for place in ours]
        taken, depths = [accepted[place] for place in ours], [spans[place].depth for place in ours]
        # A level that there was room for and that nothing was drafted for failed like one that was refused.
        reached = [min(levels + 1, depth) for levels, depth in zip(taken, depths, strict=True)]
        self.acceptance.learn(requests, taken, reached)
        deepest = _deepest(requests)
        if seconds is None or not deepest:
            return
        self.cost.note(len(requests), sum(span.rows for span in spans), max(depths), seconds)
        depth = max(depth for request, depth in zip(requests, depths, strict=True) if request.adaptive)
        load = self._loads.setdefault(stair(len(requests)), _Load())
        load.pause, load.unprobed = load.pause + 1, load.unprobed + 1
        is_probe = load.unprobed >= load.interval or not load.knows(deepest)
        if is_probe:
            load.probed = [*(each for each in load.probed if each != depth), depth]
            load.unprobed = 0
        if is_probe or load.pause >= PAUSE:
            self._choose(load, requests, deepest, is_probe)

    def _choose(self, load: _Load, requests: Sequence[Request], deepest: int, is_probe: bool) -> None:
        before, load.choice = load.choice[0], self._best(requests, self.acceptance.chances(requests, deepest))
        load.pause = 0
        if load.choice[0] != before:
            load.interval = SOONEST
        elif is_probe:
            load.interval = min(2 * load.interval, LATEST)

    def _best(self, requests: Sequence[Request], chances_RD: np.ndarray) -> tuple[int, float]:
        """(depth, least chance) with the highest rate."""
        count, levels = chances_RD.shape
        adaptive_R = np.array([request.adaptive for request in requests])
        others = [request.rows_by_depth for request in requests if not request.adaptive]
        widths_RD = np.array([_widths(request, levels) for request in requests])
        taken_TRD = (chances_RD >= LEAST[:, None, None]) & adaptive_R[:, None]
        nothing = np.zeros((len(LEAST), 1))
        rows_TD = np.hstack((nothing, np.cumsum((taken_TRD * widths_RD).sum(1), axis=1)))
        tokens_TD = np.hstack((nothing, np.cumsum((taken_TRD * chances_RD).sum(1), axis=1)))
        rows_TD += count + sum(rows[-1] for rows in others)
        tokens_TD += count + chances_RD[~adaptive_R].sum()
        used_TD = np.hstack((nothing, np.maximum.accumulate(taken_TRD.any(1) * np.arange(1, levels + 1), axis=1)))
        depths_TD = np.maximum(used_TD, max((len(rows) - 1 for rows in others), default=0))
        rate_TD = tokens_TD / self.cost.seconds(count, rows_TD, depths_TD)
        place, depth = np.unravel_index(int(rate_TD.argmax()), rate_TD.shape)
        return int(depth), float(LEAST[place])


def _deepest(requests: Sequence[Request]) -> int:
    """Most levels of any adaptive request."""
    return max((len(request.rows_by_depth) - 1 for request in requests if request.adaptive), default=0)


def _widths(request: Request, levels: int) -> list[int]:
    """Rows of each level of a request's drafts."""
    rows = request.rows_by_depth
    return [rows[d + 1] - rows[d] if d + 1 < len(rows) else 0 for d in range(levels)]
