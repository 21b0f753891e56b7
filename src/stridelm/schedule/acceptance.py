"""How likely drafts are to be accepted, learnt from those that were.

The chance that level j of a draft is accepted, given that the levels before it were, is

    a(j) = sigmoid(logit(mean[j]) + fortune)

`mean` is a drafter's average over all its requests, and `fortune` belongs to one request: how much better its text is
guessed than that of others. A level is checked if all levels before it were accepted; of the others nothing is known,
but that they are usually like the ones before them.

Fortunes are taken to be normally distributed with a variance that is learnt too. After n checks of a request the
variance of what is known of its fortune is about v / (1 + v n / 4), since a check tells most, a quarter, where both
outcomes are as likely. That is also the size of the step from the next check. So where requests are alike, one's checks
move little; where they differ, much. A request that was seldom checked is hoped to be better than is known, by a
standard deviation: a text that is never drafted for would never be found out to be a good one.

The loops are compiled, since they run at every step.

Legend: R requests, D levels, K drafters.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numba as nb
import numpy as np

from stridelm.schedule.urgency import weights
from stridelm.types import Request

FIRST = 2 / 3
"""What the first level's mean is taken to be before it was ever checked."""
WORTH = (2.0, 16.0)
"""Checks for which that counts, and for which the mean of the level before counts at every other level."""
MEMORY = 100.0
"""Most checks that a mean remembers: texts change."""
LEAST_STEP = 0.03
"""Of a fortune, for the same reason."""
SPREAD = 0.02
"""Weight of the latest step in the variance."""
MOST = 6.0
"""Largest log-odds."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Requests with what is known of them, as arrays."""

    requests: Sequence[Request]
    drafters_R: np.ndarray
    """Their drafters' numbers."""
    depths_R: np.ndarray
    """Levels that they may draft."""
    fortunes_R: np.ndarray
    checks_R: np.ndarray
    """Levels that were checked so far."""
    weights_R: np.ndarray
    """What their tokens count for, 1 for those that count most (schedule/urgency.py)."""

    def write(self, depths: Sequence[int]) -> None:
        """Leave what is known with the requests, and the levels that they are to draft."""
        known = zip(self.requests, self.fortunes_R.tolist(), self.checks_R.tolist(), depths, strict=True)
        for request, fortune, checks, depth in known:
            stats = request.stats
            stats.fortune, stats.checks, stats.depth = fortune, checks, depth


class Acceptance:
    """What belongs to a drafter. What belongs to a request lies in its `stats`, and ends with it."""

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {}
        """Drafter -> its row in what follows."""
        self._right_KD, self._checks_KD = np.zeros((0, 0)), np.zeros((0, 0))
        """Levels that were accepted, and that were checked, older ones counting less."""
        self._variance_K = np.ones(0)
        """Of the fortunes of its requests."""

    def read(self, requests: Sequence[Request]) -> Readers:
        stats = [request.stats for request in requests]
        depths = [len(request.rows_by_depth) - 1 for request in requests]
        names = [request.speculation.drafter for request in requests]
        self.extend(set(names), max(depths, default=0))
        return Readers(
            requests,
            np.array([self._numbers[name] for name in names], dtype=np.int64),
            np.array(depths, dtype=np.int64),
            np.array([each.fortune for each in stats], dtype=np.float64),
            np.array([each.checks for each in stats], dtype=np.int64),
            weights(requests),
        )

    def learn(self, readers: Readers, accepted: Sequence[int], reached: Sequence[int]) -> None:
        """Of each request's draft the first `reached` levels were checked, and the first `accepted` were accepted."""
        if not any(reached):
            return
        accepted_R, reached_R = np.array(accepted, dtype=np.int64), np.array(reached, dtype=np.int64)
        known = (readers.drafters_R, readers.fortunes_R, readers.checks_R)
        _learn(*known, accepted_R, reached_R, self._right_KD, self._checks_KD, self._variance_K)

    def chances(self, readers: Readers, depth: int) -> np.ndarray:
        """[R, D] the chance that each level is reached and accepted, for D = depth; 0 beyond a request's own depth.
        Falls from level to level."""
        known = (readers.drafters_R, readers.depths_R, readers.fortunes_R, readers.checks_R)
        return _chances(*known, depth, self._right_KD, self._checks_KD, self._variance_K)

    def extend(self, drafters: set[str | None], depth: int) -> None:
        """Have a row for each drafter, and at least this many levels."""
        for drafter in drafters - self._numbers.keys():
            self._numbers[drafter] = len(self._numbers)
        rows, levels = self._right_KD.shape
        if rows == len(self._numbers) and depth <= levels:
            return
        more = ((0, len(self._numbers) - rows), (0, max(0, depth - levels)))
        self._right_KD, self._checks_KD = np.pad(self._right_KD, more), np.pad(self._checks_KD, more)
        self._variance_K = np.pad(self._variance_K, more[0], constant_values=1.0)


@nb.njit(cache=True)
def _learn(drafters_R, fortunes_R, checks_R, accepted_R, reached_R, right_KD, checks_KD, variance_K):
    """Update all but `drafters`, `accepted` and `reached`."""
    rights_KD, reaches_KD = np.zeros_like(right_KD), np.zeros_like(right_KD)
    squares_K, known_K = np.zeros(len(variance_K)), np.zeros(len(variance_K))
    odds_KD = _all_log_odds(right_KD, checks_KD)
    for r in range(len(drafters_R)):
        k = drafters_R[r]
        for level in range(reached_R[r]):
            right = 1.0 if accepted_R[r] > level else 0.0
            missed = right - _sigmoid(odds_KD[k, level] + fortunes_R[r])
            checks_R[r] += 1
            fortunes_R[r] += max(LEAST_STEP, _uncertainty(variance_K[k], checks_R[r])) * missed
            rights_KD[k, level] += right
            reaches_KD[k, level] += 1.0
        fortunes_R[r] = min(max(fortunes_R[r], -MOST), MOST)
        if checks_R[r]:
            squares_K[k] += fortunes_R[r] ** 2 + _uncertainty(variance_K[k], checks_R[r])
            known_K[k] += 1.0
    for k in range(len(variance_K)):
        for level in range(right_KD.shape[1]):
            if reaches_KD[k, level]:
                kept = min(1.0, MEMORY / (checks_KD[k, level] + reaches_KD[k, level]))
                right_KD[k, level] = kept * (right_KD[k, level] + rights_KD[k, level])
                checks_KD[k, level] = kept * (checks_KD[k, level] + reaches_KD[k, level])
        if known_K[k]:
            variance_K[k] += SPREAD * (squares_K[k] / known_K[k] - variance_K[k])


@nb.njit(cache=True)
def _chances(drafters_R, depths_R, fortunes_R, checks_R, depth, right_KD, checks_KD, variance_K):
    odds_KD = _all_log_odds(right_KD, checks_KD)
    chances_RD = np.zeros((len(drafters_R), depth))
    for r in range(len(drafters_R)):
        k, chance = drafters_R[r], 1.0
        hoped = fortunes_R[r] + math.sqrt(_uncertainty(variance_K[k], checks_R[r]))
        for level in range(min(depth, depths_R[r])):
            chance *= _sigmoid(odds_KD[k, level] + hoped)
            chances_RD[r, level] = chance
    return chances_RD


@nb.njit(cache=True)
def _all_log_odds(right_KD, checks_KD):
    """Of the means, which are hoped to be larger than is known by half a standard deviation, as fortunes are."""
    odds_KD = np.empty_like(right_KD)
    for k in range(right_KD.shape[0]):
        mean, worth = FIRST, WORTH[0]
        for level in range(right_KD.shape[1]):
            checks = checks_KD[k, level] + worth
            mean = (right_KD[k, level] + worth * mean) / checks
            hoped = min(max(mean + 0.5 * math.sqrt(mean * (1.0 - mean) / checks), 1e-9), 1 - 1e-9)
            odds_KD[k, level] = min(max(math.log(hoped / (1.0 - hoped)), -MOST), MOST)
            worth = WORTH[1]
    return odds_KD


@nb.njit(cache=True)
def _uncertainty(variance, checks):
    """Variance of what is known of a request's fortune after so many checks."""
    return variance / (1.0 + variance * checks / 4)


@nb.njit(cache=True)
def _sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))
