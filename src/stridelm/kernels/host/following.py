"""How a head follows the target on a CPU: a few numbers per request, for which torch would make a call each.

Legend: as in kernels/step_ops.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache

import numpy as np
import torch

from stridelm.compiled import njit
from stridelm.kernels.host.memory import arrays, copied


def behind(
    slots_R: torch.Tensor,
    indices_R: torch.Tensor,
    reals_B: torch.Tensor,
    kept_B: torch.Tensor,
    waiting_S: torch.Tensor,
    committed_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    found = _behind(*arrays(slots_R, indices_R, reals_B, kept_B, waiting_S, committed_S))
    waiting_R, count_R, start_R, last_R = torch.from_numpy(found).unbind(0)
    return waiting_R, count_R, start_R, last_R


def next_tokens(
    tokens_SL: torch.Tensor, slots_R: torch.Tensor, span_N: torch.Tensor, positions_N: torch.Tensor, ahead: int
) -> torch.Tensor:
    return torch.from_numpy(_next_tokens(*arrays(tokens_SL, slots_R, span_N, positions_N), ahead))


def keep_newest(
    kept_SW: torch.Tensor,
    ready_S: torch.Tensor,
    slots_R: torch.Tensor,
    newest_RW: torch.Tensor,
    decides_B: torch.Tensor,
    indices_R: torch.Tensor,
    counts_R: torch.Tensor,
    least: int,
) -> None:
    flags, rest = arrays(ready_S, slots_R), arrays(decides_B, indices_R, counts_R)
    _keep_newest(copied(kept_SW), *flags, copied(newest_RW), *rest, least)


def recall(
    kept_SW: torch.Tensor,
    ready_S: torch.Tensor,
    known_S: torch.Tensor,
    slots_R: torch.Tensor,
    first: int,
    levels: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kept_RW = torch.empty(len(slots_R), kept_SW.shape[1], dtype=kept_SW.dtype)
    tables = arrays(ready_S, known_S, slots_R)
    ready_R, place_LR = _recall(copied(kept_SW), *tables, first, levels, copied(kept_RW))
    return kept_RW, torch.from_numpy(ready_R), torch.from_numpy(place_LR)


@cache
def compile_following() -> None:
    """Run each once for no request."""
    one, two, flags = np.empty(0, np.int64), np.empty((0, 0), np.int64), np.empty(0, np.bool_)
    _behind(one, one, one, one, one, one)
    _next_tokens(two, one, one, one, 1)
    for kind in (np.uint16, np.uint32, np.uint64):
        _keep_newest(two.astype(kind), flags, one, two.astype(kind), flags, one, one, 0)
        _recall(two.astype(kind), flags, one, one, 0, 1, two.astype(kind))


@njit(error_model="numpy")
def _behind(slots_R, indices_R, reals_B, kept_B, waiting_S, committed_S):
    found = np.empty((4, len(slots_R)), np.int64)
    for i in range(len(slots_R)):
        place, waiting, end = indices_R[i], waiting_S[slots_R[i]], committed_S[slots_R[i]]
        count = waiting + reals_B[place] + kept_B[place]
        found[0, i], found[1, i], found[2, i], found[3, i] = waiting, count, end - count, end - 1
    return found


@njit(error_model="numpy")
def _next_tokens(tokens_SL, slots_R, span_N, positions_N, ahead):
    tokens = np.empty(len(span_N), np.int64)
    for n in range(len(span_N)):
        tokens[n] = tokens_SL[slots_R[span_N[n]], positions_N[n] + ahead]
    return tokens


@njit(error_model="numpy")
def _keep_newest(kept_SW, ready_S, slots_R, newest_RW, decides_B, indices_R, counts_R, least):
    for i in range(len(slots_R)):
        slot = slots_R[i]
        if slot >= 0:
            kept_SW[slot] = newest_RW[i]
            ready_S[slot] = decides_B[indices_R[i]] and counts_R[i] >= least


@njit(error_model="numpy")
def _recall(kept_SW, ready_S, known_S, slots_R, first, levels, kept_RW):
    ready, places = np.empty(len(slots_R), np.bool_), np.empty((levels, len(slots_R)), np.int64)
    for i in range(len(slots_R)):
        kept_RW[i], ready[i] = kept_SW[slots_R[i]], ready_S[slots_R[i]]
        for level in range(levels):
            places[level, i] = known_S[slots_R[i]] + first + level
    return ready, places
