"""Depths that make the most tokens per second: from learnt chances of acceptance and measured times of steps.

A step of R requests that verifies n draft rows, drafted to depth D, emits R + (the chances of those rows) tokens and
takes `seconds(R, R + n, D)`, which grows with the tokens that attention reads. Rows are chosen in order of their
chances, over all requests, so a choice is a depth D and a least chance: a request drafts as many levels as reach it. Of
all choices the one with the highest rate is taken, and depth 0 is a choice like any other. How deep a request drafts
next is settled when its step lands.

What is not chosen is not learnt about, so now and then a step probes a depth beside it. Probes become rare while they
change nothing, and frequent again when one does.

Tokens may count for more in one request than in another (schedule/urgency.py): then chances and tokens are weighted.

Legend: R requests, D levels, T least chances.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numba as nb
import numpy as np

from stridelm.schedule.acceptance import Acceptance, Readers
from stridelm.schedule.decode_cost import DecodeCost, stair
from stridelm.schedule.depth_figures import Choice, DepthFigures, is_free
from stridelm.schedule.rows import first_row
from stridelm.schedule.urgency import keep_pace
from stridelm.types import Request, Span

LEAST = np.array([1e-9, 0.02, 0.04, 0.07, 0.1, 0.14, 0.19, 0.25, 0.32, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
"""Least chances that are considered."""
SOONEST, LATEST = 8, 512
"""Steps between two probes."""
PAUSE = 8
"""Steps between two choices."""
DEEPEST = (1 << 30, 0.0)
"""The choice of all levels."""
FILLED = 0.95
"""Share of the rows up to a stair that a choice is to fill: chances change until the next choice."""


@dataclass
class _Load:
    """What is done at about one number of requests."""

    choice: tuple[int, float]
    """Depth and least chance."""
    pause: int = PAUSE
    """Steps since the choice was made."""
    unprobed: int = 0
    """Steps since the last probe."""
    interval: int = SOONEST
    probed: int | None = None
    """The depth that was probed last."""
    awaited: int | None = None
    """The depth that a step probes which has not landed: the next one is decided on before."""

    def due(self, deepest: int) -> int | None:
        """The depth to be probed now, if it is time to: the one above the choice, then the one below, and so on. What
        is found there tells of depths beyond, too."""
        if self.unprobed + 1 < self.interval:
            return None
        chosen = min(self.choice[0], deepest)
        above, below = min(chosen + 1, deepest), max(chosen - 1, 0)
        return below if above == chosen or (self.probed == above and below != chosen) else above


class Adaptive:
    """Requests of one step share its cost, so their depths are chosen together. Those that are not adaptive keep their
    own depth, and count."""

    def __init__(self) -> None:
        _compile()
        self.row_stairs: Callable[[int, int], Sequence[int]] | None = None
        """(requests, depth) -> rows up to which steps take as long, ascending; more are not padded. None: none are."""
        self._stairs: dict[tuple[int, int], np.ndarray] = {}
        self.clear()

    def clear(self) -> None:
        self.acceptance = Acceptance()
        self.cost = DecodeCost()
        self._begin()

    def keep_costs(self) -> None:
        """Forget all but what steps cost."""
        self.acceptance = Acceptance()
        self._begin()

    def _begin(self) -> None:
        self.figures = DepthFigures()
        self._loads: dict[int, _Load] = {}
        """Number of requests, as a stair -> what is done."""
        self._decided: tuple[Sequence[Request], Sequence[int], int | None] = (), (), None
        """For which requests depths were decided last, which, and the one that is probed."""
        self._latest = DEEPEST
        """The choice made last: what is done with a number of requests that is new."""

    def depths(self, requests: Sequence[Request]) -> Sequence[int]:
        depths, probe = self._decide(requests)
        if probe is not None:
            load = self._load(requests)
            load.awaited, load.unprobed = probe, 0
        self._decided = requests, depths, probe
        return depths

    def _decide(self, requests: Sequence[Request]) -> tuple[Sequence[int], int | None]:
        """What each request drafts, and the depth that is probed, if one is."""
        own = [len(request.rows_by_depth) - 1 for request in requests]
        deepest = _deepest(requests)
        if not deepest:
            return own, None
        load = self._load(requests)
        probe = self._probe(load, requests, deepest)
        if probe is not None:
            chosen = [min(probe, depth) for depth in own]
        else:
            young = [request for request in requests if request.stats.depth is None]
            settled = iter(self._allowed(self.acceptance.read(young), deepest, load) if young else ())
            chosen = [next(settled) if (depth := each.stats.depth) is None else depth for each in requests]
        decided = [best if each.adaptive else depth for each, depth, best in zip(requests, own, chosen, strict=True)]
        return decided, probe

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float | None) -> None:
        ours = [place for place, span in enumerate(spans) if is_free(span)]
        requests = [spans[place].request for place in ours]
        deepest = _deepest(requests)
        if not deepest:
            return
        taken, depths = [accepted[place] for place in ours], [spans[place].depth for place in ours]
        # A level that there was room for and that nothing was drafted for failed like one that was refused.
        reached = [min(levels + 1, depth) for levels, depth in zip(taken, depths, strict=True)]
        readers = self.acceptance.read(requests)
        self.figures.count(requests, depths)
        load = self._load(requests)
        rows = self._padded(len(requests), sum(span.rows for span in spans), max(depths))
        context = sum(span.start for span in spans)
        if seconds is not None and load.pause + 1 >= PAUSE and self.cost.known:
            expected = self.cost.one(len(requests), rows, max(depths), context), self._tokens(readers, depths)
            self.figures.compare((expected[0], seconds), (expected[1], len(requests) + sum(taken)))
        self.acceptance.learn(readers, taken, reached)
        if seconds is not None:
            keep_pace(requests, [1 + levels for levels in taken], seconds)
            depth = max(depth for request, depth in zip(requests, depths, strict=True) if request.adaptive)
            self.cost.note(len(requests), rows, max(depths), context, seconds, depth)
            self._consider(load, readers, context, depth if depth == load.awaited else None)
        readers.write(self._allowed(readers, deepest, load))

    def explain(self, requests: Sequence[Request]) -> Choice | None:
        deepest = _deepest(requests)
        if not deepest:
            return None
        decided, depths, probe = self._decided
        if list(decided) != list(requests):
            depths, probe = self._decide(requests)
        load = self._load(requests)
        readers = self.acceptance.read(requests)
        rows = sum(1 + each.rows_by_depth[depth] for each, depth in zip(requests, depths, strict=True))
        rows, context = self._padded(len(requests), rows, max(depths)), sum(map(first_row, requests))
        return Choice(
            depths,
            probes=probe is not None,
            least=load.choice[1],
            chances=self.acceptance.chances(readers, deepest).round(4).tolist(),
            seconds=self.cost.one(len(requests), rows, max(depths), context) if self.cost.known else None,
        )

    def _load(self, requests: Sequence[Request]) -> _Load:
        return self._loads.setdefault(stair(len(requests)), _Load(self._latest))

    def _probe(self, load: _Load, requests: Sequence[Request], deepest: int) -> int | None:
        """The depth to be probed now, if any: first each once, the deepest first."""
        untried = self.cost.untried(len(requests), deepest)
        return load.due(deepest) if untried is None else untried

    def _tokens(self, readers: Readers, depths: Sequence[int]) -> float:
        """Expected of a step with drafts of these depths."""
        chances_RD = self.acceptance.chances(readers, max(depths))
        drafted_RD = np.arange(chances_RD.shape[1]) < np.array(depths)[:, None]
        return len(depths) + float(chances_RD[drafted_RD].sum())

    def _consider(self, load: _Load, readers: Readers, context: int, probed: int | None) -> None:
        """Choose anew if it is time to. probed: the depth that the step which has landed tried, if it did."""
        load.pause, load.unprobed = load.pause + 1, load.unprobed + 1
        if probed is not None:
            load.probed, load.awaited, load.unprobed = probed, None, 0
        elif load.pause < PAUSE:
            return
        before, load.choice = load.choice[0], self._best(readers, context)
        load.pause, self._latest = 0, load.choice
        if load.choice[0] != before:
            load.interval = SOONEST
        elif probed is not None:
            load.interval = min(2 * load.interval, LATEST)

    def _allowed(self, readers: Readers, deepest: int, load: _Load) -> list[int]:
        """Levels that each request drafts."""
        depth, least = load.choice
        chances_RD = self.acceptance.chances(readers, deepest)[:, :depth]
        allowed: list[int] = (readers.weights_R[:, None] * chances_RD >= least).sum(1).tolist()
        return allowed

    def _best(self, readers: Readers, context: int) -> tuple[int, float]:
        """(depth, least chance) with the highest rate."""
        deepest = _deepest(readers.requests)
        widths = {request.rows_by_depth: _widths(request.rows_by_depth, deepest) for request in readers.requests}
        widths_RD = np.array([widths[request.rows_by_depth] for request in readers.requests], dtype=np.float64)
        adaptive_R = np.array([request.adaptive for request in readers.requests])
        chances_RD = self.acceptance.chances(readers, deepest)
        least_T = self._thresholds(readers.weights_R[adaptive_R, None] * chances_RD[adaptive_R], len(chances_RD))
        rows_TD, tokens_TD, depths_TD = _choices(
            chances_RD, widths_RD, adaptive_R, readers.depths_R, readers.weights_R, least_T
        )
        for depth in range(1, deepest + 1):
            drafts_T, rows_T = depths_TD[:, depth] > 0, rows_TD[:, depth]  # nothing is drafted if no chance reaches
            rows_TD[:, depth] = np.where(drafts_T, self._all_padded(len(chances_RD), rows_T, depth), rows_T)
        rate_TD = tokens_TD / self.cost.seconds(len(chances_RD), rows_TD, depths_TD, context)
        place, chosen = np.unravel_index(int(rate_TD.argmax()), rate_TD.shape)
        self.figures.gain = float(rate_TD[place, chosen] / rate_TD[0, 0])
        return int(chosen), float(least_T[place])

    def _thresholds(self, chances_RD: np.ndarray, count: int) -> np.ndarray:
        """[T] least chances to consider: of the rows up to a stair all cost the same, so those that fill one too."""
        if self.row_stairs is None:
            return LEAST
        worth = np.sort(chances_RD, axis=None)[::-1]
        stairs = np.unique(np.concatenate([self._stairs_of(count, level + 1) for level in range(chances_RD.shape[1])]))
        filled = (FILLED * (stairs - count)).astype(np.int64)
        filled = filled[(filled > 0) & (filled < len(worth))]
        return np.unique(np.concatenate((LEAST, worth[filled - 1])))

    def _stairs_of(self, count: int, depth: int) -> np.ndarray:
        assert self.row_stairs is not None
        if (count, depth) not in self._stairs:
            self._stairs[count, depth] = np.array(self.row_stairs(count, depth), dtype=np.int64)
        return self._stairs[count, depth]

    def _all_padded(self, count: int, rows_T: np.ndarray, depth: int) -> np.ndarray:
        """Rows that steps of so many requests, drafted to this depth, are padded to."""
        if self.row_stairs is None or not depth:
            return rows_T
        stairs = self._stairs_of(count, depth)
        place_T = np.searchsorted(stairs, rows_T)
        return np.where(place_T < len(stairs), np.append(stairs, 0)[place_T], rows_T)

    def _padded(self, count: int, rows: int, depth: int) -> int:
        return int(self._all_padded(count, np.array(rows), depth))


@nb.njit(cache=True)
def _choices(chances_RD, widths_RD, adaptive_R, depths_R, weights_R, least_T):
    """[T, D + 1] rows, weighted tokens and depth of a step, for each least chance and depth."""
    count, levels = chances_RD.shape
    rows_TD, tokens_TD = np.zeros((len(least_T), levels + 1)), np.zeros((len(least_T), levels + 1))
    depths_TD = np.zeros((len(least_T), levels + 1))
    for t in range(len(least_T)):
        rows_TD[t, 0], tokens_TD[t, 0] = count, weights_R.sum()
        for r in range(count):
            if not adaptive_R[r]:
                rows_TD[t, 0] += widths_RD[r].sum()
                tokens_TD[t, 0] += weights_R[r] * chances_RD[r].sum()
                depths_TD[t, 0] = max(depths_TD[t, 0], depths_R[r])
        for level in range(levels):
            rows, tokens, depth = rows_TD[t, level], tokens_TD[t, level], depths_TD[t, level]
            for r in range(count):
                chance = weights_R[r] * chances_RD[r, level]
                if adaptive_R[r] and chance >= least_T[t]:
                    rows += widths_RD[r, level]
                    tokens += chance
                    depth = max(depth, level + 1)
            rows_TD[t, level + 1], tokens_TD[t, level + 1], depths_TD[t, level + 1] = rows, tokens, depth
    return rows_TD, tokens_TD, depths_TD


@cache
def _compile() -> None:
    """Run the compiled loops once, so that no request waits for them: compiling takes some seconds, once per
    machine."""
    one, level, cost = np.ones(1, dtype=np.int64), np.ones((1, 1)), DecodeCost()
    acceptance, readers = Acceptance(), Readers((), 0 * one, one, np.zeros(1), 0 * one, np.ones(1))
    acceptance.extend({""}, 1)
    acceptance.learn(readers, [1], [1])
    _choices(acceptance.chances(readers, 1), level, one > 0, one, np.ones(1), LEAST)
    cost.note(1, 1, 1, 1, 1.0, 1)
    cost.seconds(1, level, level, 1)


def _deepest(requests: Sequence[Request]) -> int:
    """Most levels of any adaptive request."""
    return max((len(request.rows_by_depth) - 1 for request in requests if request.adaptive), default=0)


def _widths(rows_by_depth: tuple[int, ...], levels: int) -> list[int]:
    """Rows of each level of a request's drafts."""
    return [rows_by_depth[d + 1] - rows_by_depth[d] if d + 1 < len(rows_by_depth) else 0 for d in range(levels)]
