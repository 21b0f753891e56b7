"""How likely drafts are to be accepted, learnt from those that were.

The chance that level j of a draft is accepted, given that the levels before it were, is

    a(j) = sigmoid(logit(mean[j]) + fortune)

`mean` is a drafter's average over all its requests, and `fortune` belongs to one request: how much better its text is
guessed than that of others. So fortunes are kept at 0 on average, by checks: what one request tells that is alone, or
all tell alike, would count in its fortune and again in the mean. A level is checked if all levels before it were
accepted; of the others nothing is known, but that they are usually like the ones before them.

Fortunes are taken to be normally distributed with a variance that is learnt too. After n checks of a request the
variance of what is known of its fortune is about v / (1 + v n / 4), since a check tells most, a quarter, where both
outcomes are as likely. That is also the size of the step from the next check. So where requests are alike, one's checks
move little; where they differ, much. And of all requests to come the checks of a few tell little, however many they
are: n of one request tell as much as n / (1 + v n / 4) of different ones, which is 4 / v at most.

What is little known is hoped to be better: a text that is never drafted for would never be found out to be a good one.
Probes find that out too, so the hope is small, once the request was checked often, or many others were. Whoever asks
may leave it out, where trying costs too much.

The loops are compiled, since they run at every step.

Legend: P places in the table of requests (schedule/known.py), R requests, D levels, K drafters, S steps.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stridelm.compiled import njit
from stridelm.schedule.known import Known
from stridelm.types import Request

FIRST = 2 / 3
"""What the first level's mean is taken to be before it was ever checked."""
WORTH = (2.0, 16.0)
"""Checks for which that counts, and for which the mean of the level before counts at every other level."""
MEMORY = 400.0
"""Most checks that a mean remembers: texts change."""
LEAST_STEP = 0.03
"""Of a fortune, for the same reason."""
SPREAD = 0.02
"""Weight of the latest step in the variance."""
MOST = 6.0
"""Largest log-odds."""
HOPE, YOUNG = 0.08, 32.0
"""Standard deviations by which what is little known is hoped to be better, once many more than YOUNG checks tell of a
request. Before that it is up to a whole one, since what is learnt then serves it and all requests to come, and a few
refusals, or a few bad texts, at the start must not end all drafting."""

Levels = Sequence[int] | np.ndarray
"""[R] of each request."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Requests of a step."""

    known: Known
    places_R: np.ndarray
    """Where what is known of them is."""

    @property
    def weights_R(self) -> np.ndarray:
        """What their tokens count for, 1 for those that count most (schedule/urgency.py)."""
        return _weights(self.known.requests_P, self.places_R)

    def write(self, depths: Levels) -> None:
        """Note the levels that they are to draft."""
        self.known.requests_P["depth"][self.places_R] = depths

    def note(self, depth: int, allowed: Allowed, which: slice | np.ndarray = slice(None)) -> None:
        """Note why, for whoever asks: a choice of this depth allowed it. which: of them this is said."""
        places_R = self.places_R[which]
        self.known.requests_P["most"][places_R] = depth
        self.known.requests_P["least"][places_R] = allowed.least_R[which]
        self.known.chances_PD[places_R] = allowed.chances_RD[which]


@dataclass(frozen=True, slots=True)
class Allowed:
    """What requests are to draft, and by what that was chosen."""

    levels_R: np.ndarray
    least_R: np.ndarray
    """The least chance with which a level of the request is worth its row."""
    chances_RD: np.ndarray
    """Of all levels that any request may draft."""


class Acceptance:
    """What belongs to a drafter, and, in a table, what belongs to a request."""

    def __init__(self) -> None:
        self.known = Known()
        self.forget()

    def forget(self) -> None:
        self.known.forget()
        self._right_KD, self._checks_KD = np.zeros((0, 0)), np.zeros((0, 0))
        """Of each drafter, by its number: levels that were accepted, and that were checked, older ones counting
        less."""
        self._telling_K = np.zeros(0)
        """How many checks of different requests would tell as much of those to come."""
        self._variance_K = np.ones(0)
        """Of the fortunes of its requests."""

    def read(self, requests: Sequence[Request]) -> Readers:
        places_R = self.known.places(requests)
        if len(self._variance_K) < len(self.known.drafters) or self._right_KD.shape[1] < self.known.levels:
            self._extend(len(self.known.drafters), self.known.levels)
        return Readers(self.known, places_R)

    def learn(self, readers: Readers, accepted: Levels, reached: Levels) -> None:
        """Of each request's draft the first `reached` levels were checked, and the first `accepted` were accepted; or
        of several drafts one after another, [S, R]."""
        accepted_SR, reached_SR = (np.atleast_2d(np.asarray(each, dtype=np.uint8)) for each in (accepted, reached))
        _learn(*self._of(readers), accepted_SR, reached_SR)

    def chances(self, readers: Readers, depth: int, *, hoped: bool = True) -> np.ndarray:
        """[R, D] the chance that each level is reached and accepted, for D = depth; 0 beyond a request's own depth.
        Falls from level to level. hoped: what is little known is hoped to be better."""
        return _chances(*self._of(readers), depth, float(hoped))

    def allowed(self, readers: Readers, depth: int, least: float, *, hoped: bool = True) -> Allowed:
        """Levels up to `depth`, while weighted chances are at least `least`. Requests that are not adaptive draft all
        of theirs."""
        chances_RD = self.chances(readers, readers.known.levels, hoped=hoped)
        about = readers.known.requests_P, readers.places_R, readers.weights_R
        levels_R, least_R = _allowed(*about, chances_RD, depth, least)
        return Allowed(levels_R, least_R, chances_RD)

    def _of(self, readers: Readers) -> tuple[np.ndarray, ...]:
        of_drafters = self._right_KD, self._checks_KD, self._telling_K, self._variance_K
        return self.known.requests_P, readers.places_R, *of_drafters

    def _extend(self, drafters: int, levels: int) -> None:
        """Have a row for each drafter, and at least this many levels."""
        rows, columns = self._right_KD.shape
        more = ((0, drafters - rows), (0, max(0, levels - columns)))
        self._right_KD, self._checks_KD = np.pad(self._right_KD, more), np.pad(self._checks_KD, more)
        self._telling_K = np.pad(self._telling_K, more[0])
        self._variance_K = np.pad(self._variance_K, more[0], constant_values=1.0)


@njit()
def _weights(requests_P, places_R):
    weights_R = np.empty(len(places_R))
    heaviest = 0.0
    for r in range(len(places_R)):
        weights_R[r] = requests_P[places_R[r]].weight
        heaviest = max(heaviest, weights_R[r])
    return weights_R / heaviest


@njit()
def _learn(requests_P, places_R, right_KD, checks_KD, telling_K, variance_K, accepted_SR, reached_SR):
    """Update all but the last two."""
    for s in range(len(reached_SR)):
        _learn_step(requests_P, places_R, right_KD, checks_KD, telling_K, variance_K, accepted_SR[s], reached_SR[s])


@njit()
def _learn_step(requests_P, places_R, right_KD, checks_KD, telling_K, variance_K, accepted_R, reached_R):
    rights_KD, reaches_KD = np.zeros_like(right_KD), np.zeros_like(right_KD)
    squares_K, known_K, fortunes_K = np.zeros_like(variance_K), np.zeros_like(variance_K), np.zeros_like(variance_K)
    if not reached_R.any():
        return
    odds_KD = _all_log_odds(right_KD, checks_KD)
    for r in range(len(places_R)):
        place = places_R[r]
        k, fortune, checks = requests_P[place].drafter, requests_P[place].fortune, requests_P[place].checks
        for level in range(reached_R[r]):
            right = 1.0 if accepted_R[r] > level else 0.0
            missed = right - _sigmoid(odds_KD[k, level] + fortune)
            telling_K[k] += 1.0 / (1.0 + variance_K[k] * checks / 4) ** 2  # what this one adds
            checks += 1
            fortune += max(LEAST_STEP, _uncertainty(variance_K[k], checks)) * missed
            rights_KD[k, level] += right
            reaches_KD[k, level] += 1.0
        fortune = min(max(fortune, -MOST), MOST)
        fortunes_K[k] += reached_R[r] * fortune
        requests_P[place].fortune, requests_P[place].checks = fortune, checks
    shares_K = fortunes_K / np.maximum(1.0, checks_KD.sum(axis=1) + reaches_KD.sum(axis=1))
    for r in range(len(places_R)):
        place = places_R[r]
        k, checks = requests_P[place].drafter, requests_P[place].checks
        if checks:
            requests_P[place].fortune -= shares_K[k]
            of_others = max(0.0, telling_K[k] - _telling(variance_K[k], checks))
            squares_K[k] += requests_P[place].fortune ** 2 + _doubt(variance_K[k], of_others, checks)
            known_K[k] += 1.0
    for k in range(len(variance_K)):
        for level in range(right_KD.shape[1]):
            if reaches_KD[k, level]:
                kept = min(1.0, MEMORY / (checks_KD[k, level] + reaches_KD[k, level]))
                right_KD[k, level] = kept * (right_KD[k, level] + rights_KD[k, level])
                checks_KD[k, level] = kept * (checks_KD[k, level] + reaches_KD[k, level])
                if not level:
                    telling_K[k] *= kept
        if known_K[k]:
            variance_K[k] += SPREAD * (squares_K[k] / known_K[k] - variance_K[k])


@njit()
def _chances(requests_P, places_R, right_KD, checks_KD, telling_K, variance_K, depth, hope):
    odds_KD = np.exp(_all_log_odds(right_KD, checks_KD))
    chances_RD = np.zeros((len(places_R), depth))
    for r in range(len(places_R)):
        request, chance = requests_P[places_R[r]], 1.0
        better = _better(request, telling_K[request.drafter], variance_K[request.drafter], hope)
        for level in range(min(depth, request.levels)):
            odds = odds_KD[request.drafter, level] * better
            chance *= odds / (1.0 + odds)
            chances_RD[r, level] = chance
    return chances_RD


@njit()
def _allowed(requests_P, places_R, weights_R, chances_RD, depth, least):
    allowed_R, least_R = np.zeros(len(places_R), dtype=np.int64), least / weights_R
    for r in range(len(places_R)):
        request = requests_P[places_R[r]]
        if not request.adaptive:
            allowed_R[r] = request.levels
            continue
        for level in range(min(depth, request.levels)):
            if weights_R[r] * chances_RD[r, level] < least:
                break
            allowed_R[r] = level + 1
            least_R[r] = min(least_R[r], chances_RD[r, level])  # that of a level may be the least, but for rounding
    return allowed_R, least_R


@njit()
def _better(request, telling, variance, hope):
    """By what factor a request's odds are above its drafter's, or are hoped to be. What is not known is its fortune and
    the mean of all requests. hope: 1, or 0 for none."""
    deviations = hope * (HOPE + (1.0 - HOPE) * YOUNG**2 / (YOUNG**2 + (telling + request.checks) ** 2))
    unknown = _uncertainty(variance + _of_mean(telling), request.checks)
    return math.exp(request.fortune + deviations * math.sqrt(unknown))


@njit()
def _all_log_odds(right_KD, checks_KD):
    """Of the means."""
    odds_KD = np.empty_like(right_KD)
    for k in range(right_KD.shape[0]):
        mean, worth = FIRST, WORTH[0]
        for level in range(right_KD.shape[1]):
            mean = (right_KD[k, level] + worth * mean) / (checks_KD[k, level] + worth)
            bounded = min(max(mean, 1e-9), 1 - 1e-9)
            odds_KD[k, level] = min(max(math.log(bounded / (1.0 - bounded)), -MOST), MOST)
            worth = WORTH[1]
    return odds_KD


@njit()
def _of_mean(telling):
    """Variance of what is known of a drafter's mean."""
    return 4 / (WORTH[0] + telling)


@njit()
def _telling(variance, checks):
    """As many checks of different requests as so many of one are worth to all others."""
    return checks / (1.0 + variance * checks / 4)


@njit()
def _doubt(variance, of_others, checks):
    """Variance of what is known of a fortune after so many checks, which tell it and the mean in one: that of the only
    request stays unknown. of_others: checks of others that tell of the mean."""
    return variance - variance**2 / (variance + _of_mean(of_others) + 4 / checks)


@njit()
def _uncertainty(variance, checks):
    """Variance of what is known of something after so many checks, by its variance before."""
    return variance / (1.0 + variance * checks / 4)


@njit()
def _sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))
