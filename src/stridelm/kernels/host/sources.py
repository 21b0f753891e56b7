"""Choosing between two sources of drafts, and learning from what became of both, on a CPU: a few numbers per request,
for which torch would make about fifty calls.

Legend: as in kernels/plain_sources.py, which says what is computed.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from stridelm.compiled import njit
from stridelm.kernels.host.memory import array, arrays
from stridelm.kernels.plain_sources import HIGHEST, MEMORY, MOST_CHECKS, OWN, PRIOR, SourceTables

_PRIOR, _OWN, _MEMORY, _HIGHEST = np.float32(PRIOR), np.float32(OWN), np.float32(MEMORY), np.float32(HIGHEST)
_ONE = np.float32(1)


def choose_sources(
    tables: SourceTables,
    slots_R: torch.Tensor,
    bounds_R: torch.Tensor,
    guessed: int,
    looked_RW: torch.Tensor,
    exists_RW: torch.Tensor,
    matched_R: torch.Tensor,
    class_of_length: torch.Tensor,
) -> torch.Tensor:
    found = arrays(slots_R, bounds_R, looked_RW, exists_RW, matched_R, class_of_length)
    return torch.from_numpy(_choose(*_of(tables), *found, guessed))


def learn_sources(
    tables: SourceTables, slots_R: torch.Tensor, emitted_RK: torch.Tensor, counts_R: torch.Tensor
) -> None:
    _learn(*_of(tables), *arrays(slots_R, emitted_RK, counts_R))


@cache
def compile_sources() -> None:
    """Run each once for no request."""
    one, two = np.empty(0, np.int64), np.empty((0, 0), np.int64)
    three, flags = np.empty((0, 0, 0), np.int64), np.empty(0, np.bool_)
    tables = (three, two, two, np.empty((0, 0, 0), np.float32), flags, three, np.empty((0, 0), np.float32))
    _choose(*tables, one, one, two, two.astype(np.bool_), one, one, 1)
    _learn(*tables, one, two, one)


def _of(tables: SourceTables) -> list[np.ndarray[Any, Any]]:
    """In place, not copied: they are written to."""
    return [
        array(tensor)
        for tensor in (
            tables.guesses_S2W,
            tables.levels_S2,
            tables.classes_S2,
            tables.luck_S22,
            tables.shares_S,
            tables.counts_CD2,
            tables.given_CD,
        )
    ]


@njit(error_model="numpy")
def _mean(shares, counts_CD2, given_CD, row, level):
    level = min(level, given_CD.shape[1] - 1)
    if not shares:
        return given_CD[row, level]
    right, checked = np.float32(counts_CD2[row, level, 0]), np.float32(counts_CD2[row, level, 1])
    return (right + _PRIOR * given_CD[row, level]) / (checked + _PRIOR)


@njit(error_model="numpy")
def _choose(
    guesses_S2W,
    levels_S2,
    classes_S2,
    luck_S22,
    shares_S,
    counts_CD2,
    given_CD,
    slots_R,
    bounds_R,
    looked_RW,
    exists_RW,
    matched_R,
    class_of_length,
    guessed,
):
    requests, width = looked_RW.shape
    chosen = np.zeros(requests, np.bool_)
    for i in range(requests):
        slot = slots_R[i]
        if slot < 0:
            continue
        found = np.int64(0)
        for column in range(width):
            found += exists_RW[i, column]
            guesses_S2W[slot, 1, column] = looked_RW[i, column]
        found = min(found, bounds_R[i])
        levels_S2[slot, 0], levels_S2[slot, 1] = 0, found
        classes_S2[slot, 0] = 0
        classes_S2[slot, 1] = class_of_length[min(matched_R[i], len(class_of_length) - 1)]
        best = np.float32(0)
        for source in range(2):
            luck = (luck_S22[slot, source, 0] + _OWN) / (luck_S22[slot, source, 1] + _OWN)
            worth, chance = np.float32(0), _ONE
            for level in range(found if source else min(guessed, bounds_R[i], width)):
                mean = _mean(shares_S[slot], counts_CD2, given_CD, classes_S2[slot, source], level)
                chance *= min(mean * luck, _HIGHEST)
                worth += chance
            chosen[i] = source == 1 and worth > best
            best = worth
    return chosen


@njit(error_model="numpy")
def _learn(
    guesses_S2W,
    levels_S2,
    classes_S2,
    luck_S22,
    shares_S,
    counts_CD2,
    given_CD,
    slots_R,
    emitted_RK,
    counts_R,
):
    news_CD2 = np.zeros_like(counts_CD2)
    for i in range(len(slots_R)):
        slot = slots_R[i]
        if slot < 0:
            continue
        for source in range(2):
            row, right, expected, checked = classes_S2[slot, source], 0, np.float32(0), False
            for level in range(min(levels_S2[slot, source], counts_R[i])):
                expected += _mean(shares_S[slot], counts_CD2, given_CD, row, level)
                same = guesses_S2W[slot, source, level] == emitted_RK[i, level]
                checked, right = True, right + same
                if shares_S[slot]:
                    last = min(level, given_CD.shape[1] - 1)
                    news_CD2[row, last, 0] += same
                    news_CD2[row, last, 1] += 1
                if not same:
                    break
            if checked:
                luck_S22[slot, source, 0] = _MEMORY * luck_S22[slot, source, 0] + np.float32(right)
                luck_S22[slot, source, 1] = _MEMORY * luck_S22[slot, source, 1] + expected
            levels_S2[slot, source] = 0
    for row in range(counts_CD2.shape[0]):
        for level in range(counts_CD2.shape[1]):
            for column in range(2):
                counts_CD2[row, level, column] += news_CD2[row, level, column]
            if counts_CD2[row, level, 1] > MOST_CHECKS:
                counts_CD2[row, level, 0] >>= 1
                counts_CD2[row, level, 1] >>= 1
