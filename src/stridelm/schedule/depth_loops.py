"""The loops over a step's requests by which depths are chosen (adaptive.py, rates.py), compiled since they run
between steps.

Legend: P places in the table of requests (schedule/known.py), R requests, D levels, S stairs or steps, T least chances.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import numpy as np

from stridelm.compiled import njit
from stridelm.schedule.known import UNDECIDED

NEVER = np.iinfo(np.int64).max
"""Rows that no step has."""


@njit()
def pad(rows_TD, depths_TD, stairs_DS):
    """Raise rows to the next stair, where anything is drafted: nothing is if no chance reaches the least."""
    for t in range(rows_TD.shape[0]):
        for depth in range(1, rows_TD.shape[1]):
            place = np.searchsorted(stairs_DS[depth], rows_TD[t, depth])
            if depths_TD[t, depth] and place < stairs_DS.shape[1] and stairs_DS[depth, place] < NEVER:
                rows_TD[t, depth] = stairs_DS[depth, place]


@njit()
def worth(requests_P, rows_PD, places_R, weights_R, chances_RD):
    """The weighted chances of all levels that may be chosen, in one row."""
    worth = np.empty(chances_RD.size)
    size = 0
    for r in range(len(places_R)):
        request = requests_P[places_R[r]]
        if request.adaptive:
            for level in range(min(request.levels, chances_RD.shape[1])):
                worth[size] = weights_R[r] * chances_RD[r, level]
                size += 1
    return worth[:size]


@njit()
def choices(requests_P, rows_PD, places_R, weights_R, chances_RD, least_T):
    """[T, D + 1] rows, weighted tokens and depth of a step, for each least chance, ascending, and depth."""
    count, levels = chances_RD.shape
    rows_TD, tokens_TD = np.zeros((len(least_T), levels + 1)), np.zeros((len(least_T), levels + 1))
    depths_TD = np.zeros((len(least_T), levels + 1))
    rows, tokens, depth = float(count), weights_R.sum(), 0
    for r in range(count):
        request, place = requests_P[places_R[r]], places_R[r]
        if not request.adaptive:
            rows += rows_PD[place, min(levels, request.levels)]
            tokens += weights_R[r] * chances_RD[r].sum()
            depth = max(depth, request.levels)
            continue
        t = len(least_T)  # thresholds that the level reaches; chances fall from level to level
        for level in range(levels):
            chance = weights_R[r] * chances_RD[r, level]
            while t and least_T[t - 1] > chance:
                t -= 1
            if not t:
                break
            rows_TD[t - 1, level + 1] += rows_PD[place, level + 1] - rows_PD[place, level]
            tokens_TD[t - 1, level + 1] += chance
    for t in range(len(least_T) - 2, -1, -1):  # what reaches a threshold reaches those below it
        rows_TD[t], tokens_TD[t] = rows_TD[t] + rows_TD[t + 1], tokens_TD[t] + tokens_TD[t + 1]
    for t in range(len(least_T)):
        depths_TD[t, 0], total, gained = depth, rows, tokens
        for level in range(levels):
            depths_TD[t, level + 1] = max(depths_TD[t, level], level + 1 if rows_TD[t, level + 1] else 0)
        for level in range(levels + 1):
            total, gained = total + rows_TD[t, level], gained + tokens_TD[t, level]
            rows_TD[t, level], tokens_TD[t, level] = total, gained
    return rows_TD, tokens_TD, depths_TD


@njit()
def trim(requests_P, rows_PD, places_R, weights_R, chances_RD, depths_R, excess):
    """Lower depths until there are as many rows less, beginning with the levels of the least weighted chances."""
    while excess > 0:
        least, last = np.inf, -1
        for r in range(len(places_R)):
            level = depths_R[r]
            if level and requests_P[places_R[r]].adaptive and weights_R[r] * chances_RD[r, level - 1] < least:
                least, last = weights_R[r] * chances_RD[r, level - 1], r
        if last < 0:
            break
        depths_R[last] -= 1
        place, level = places_R[last], depths_R[last]
        excess -= rows_PD[place, level + 1] - rows_PD[place, level]


@njit()
def deepest_of(requests_P, places_R):
    """Most levels of any adaptive request."""
    deepest = 0
    for place in places_R:
        if requests_P[place].adaptive:
            deepest = max(deepest, requests_P[place].levels)
    return deepest


@njit()
def own_depths(requests_P, places_R, probe):
    """[R] what each drafts, UNDECIDED where that is still to be found out, and how often it is. probe: the depth that
    is probed, or UNDECIDED."""
    depths_R, young = np.empty(len(places_R), dtype=np.int64), 0
    for r in range(len(places_R)):
        request = requests_P[places_R[r]]
        if not request.adaptive:
            depths_R[r] = request.levels
        elif probe != UNDECIDED:
            depths_R[r] = min(probe, request.levels)
        else:
            depths_R[r] = request.depth
            young += request.depth == UNDECIDED
    return depths_R, young


@njit()
def sums(requests_P, rows_PD, places_R, depths_SR):
    """[D + 1] how often so many levels were drafted for an adaptive request; most levels of any such; rows of full
    drafts; and of each step, [3, S], rows drafted, the depth of the deepest draft, and of the deepest of an adaptive
    request."""
    often_D, steps_3S = np.zeros(rows_PD.shape[1], dtype=np.int64), np.zeros((3, len(depths_SR)), dtype=np.int64)
    deepest, most = 0, 0
    for r in range(len(places_R)):
        request = requests_P[places_R[r]]
        most += rows_PD[places_R[r], request.levels]
        if request.adaptive:
            deepest = max(deepest, request.levels)
        for s in range(len(depths_SR)):
            level = int(depths_SR[s, r])
            steps_3S[0, s] += rows_PD[places_R[r], level]
            steps_3S[1, s] = max(steps_3S[1, s], level)
            if request.adaptive:
                often_D[level] += 1
                steps_3S[2, s] = max(steps_3S[2, s], level)
    return often_D, deepest, most, steps_3S
