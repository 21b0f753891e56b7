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

Legend: R requests, D levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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


@dataclass
class _Levels:
    """Of one drafter."""

    right: np.ndarray = field(default_factory=lambda: np.empty(0))
    checks: np.ndarray = field(default_factory=lambda: np.empty(0))
    """Levels that were accepted, and that were checked, older ones counting less."""
    variance: float = 1.0
    """Of its requests' fortunes."""

    def extend(self, depth: int) -> None:
        """Have at least this many levels."""
        more = np.zeros(max(0, depth - len(self.right)))
        self.right, self.checks = np.append(self.right, more), np.append(self.checks, more)

    def note(self, level: int, right: int, checks: int) -> None:
        """So many requests had the level checked, and so many of them accepted."""
        kept = min(1.0, MEMORY / (self.checks[level] + checks))
        self.right[level] = kept * (self.right[level] + right)
        self.checks[level] = kept * (self.checks[level] + checks)

    @property
    def log_odds(self) -> np.ndarray:
        """Of the means, which are hoped to be larger than is known by half a standard deviation, as fortunes are."""
        means, mean, worth = np.empty(len(self.right)), FIRST, WORTH[0]
        for level, (right, checks) in enumerate(zip(self.right.tolist(), self.checks.tolist(), strict=True)):
            mean = (right + worth * mean) / (checks + worth)
            means[level] = mean + 0.5 * (mean * (1.0 - mean) / (checks + worth)) ** 0.5
            worth = WORTH[1]
        means = np.clip(means, 1e-9, 1 - 1e-9)
        return np.clip(np.log(means / (1.0 - means)), -MOST, MOST)

    def uncertainty(self, checks_R: np.ndarray) -> np.ndarray:
        """Variance of what is known of requests' fortunes after so many checks."""
        return self.variance / (1.0 + self.variance * checks_R / 4)


class Acceptance:
    """What belongs to a request lies in `Request.stats.fortune`, and ends with it."""

    def __init__(self) -> None:
        self._drafters: dict[str, _Levels] = {}

    def learn(self, requests: Sequence[Request], accepted: Sequence[int], reached: Sequence[int]) -> None:
        """Of each request's draft the first `reached` levels were checked, and the first `accepted` were accepted."""
        if not any(reached):
            return
        (fortune_R, checks_R), reached_R, accepted_R = _known(requests), np.asarray(reached), np.asarray(accepted)
        for drafter, mine_R in self._by_drafter(requests).items():
            levels = self._levels(drafter, int(reached_R[mine_R].max()))
            for level, log_odds in enumerate(levels.log_odds[: reached_R[mine_R].max()]):
                checked_R = mine_R[reached_R[mine_R] > level]
                right_R = accepted_R[checked_R] > level
                missed_R = right_R - _sigmoid(log_odds + fortune_R[checked_R])
                checks_R[checked_R] += 1
                fortune_R[checked_R] += np.maximum(LEAST_STEP, levels.uncertainty(checks_R[checked_R])) * missed_R
                levels.note(level, int(right_R.sum()), len(checked_R))
            known_R = mine_R[checks_R[mine_R] > 0]
            if len(known_R):
                squares_R = fortune_R[known_R] ** 2 + levels.uncertainty(checks_R[known_R])
                levels.variance += SPREAD * (float(squares_R.mean()) - levels.variance)
        fortunes_now = np.clip(fortune_R, -MOST, MOST).tolist()
        for request, fortune, checks in zip(requests, fortunes_now, checks_R.tolist(), strict=True):
            request.stats.fortune, request.stats.checks = fortune, checks

    def chances(self, requests: Sequence[Request], depth: int) -> np.ndarray:
        """[R, D] the chance that each level is reached and accepted, for D = depth; 0 beyond a request's own depth.
        Falls from level to level."""
        own_R = np.array([len(request.rows_by_depth) - 1 for request in requests])
        log_odds_RD = np.empty((len(requests), depth))
        fortune_R, checks_R = _known(requests)
        for drafter, mine_R in self._by_drafter(requests).items():
            levels = self._levels(drafter, depth)
            hope_R = np.sqrt(levels.uncertainty(checks_R[mine_R]))
            log_odds_RD[mine_R] = levels.log_odds[:depth] + (fortune_R[mine_R] + hope_R)[:, None]
        log_odds_RD[np.arange(depth) >= own_R[:, None]] = -np.inf
        return np.cumprod(_sigmoid(log_odds_RD), axis=1)

    def _levels(self, drafter: str, depth: int) -> _Levels:
        levels = self._drafters.setdefault(drafter, _Levels())
        levels.extend(depth)
        return levels

    @staticmethod
    def _by_drafter(requests: Sequence[Request]) -> dict[str, np.ndarray]:
        """Drafter -> places of its requests."""
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(request.speculation.drafter or "", []).append(place)
        return {drafter: np.array(mine) for drafter, mine in places.items()}


def _known(requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray]:
    """Each request's fortune, and the checks that it is known by."""
    stats = [request.stats for request in requests]
    return np.array([each.fortune for each in stats]), np.array([each.checks for each in stats])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))
