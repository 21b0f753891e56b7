"""Choosing between two sources of drafts, and learning from what became of both, on a GPU: one program per request.

What all requests share is read at the start of a launch and added to in integers at its end, so that the order of
programs changes nothing.

Legend: as in plain_sources.py, which says what is computed.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.index_kernel import NODES, index_kernel
from stridelm.kernels.plain_sources import HIGHEST, MEMORY, OWN, PRIOR, SourceTables, halve

_PRIOR, _OWN = tl.constexpr(PRIOR), tl.constexpr(OWN)
_MEMORY, _HIGHEST = tl.constexpr(MEMORY), tl.constexpr(HIGHEST)
_WARPS = 1


@triton.jit
def _mean(shares, counts, given, place):
    """Of a class and level, which are one place in the tables."""
    start = tl.load(given + place)
    right, checked = tl.load(counts + 2 * place).to(tl.float32), tl.load(counts + 2 * place + 1).to(tl.float32)
    return tl.where(shares != 0, (right + start * _PRIOR) / (checked + _PRIOR), start)


@triton.jit
def _worth(luck, shares, counts, given, row, levels, depths):
    """Tokens that are expected to be accepted of so many levels. luck: of the request and source."""
    lucky = (tl.load(luck) + _OWN) / (tl.load(luck + 1) + _OWN)
    worth, chance = lucky * 0, lucky * 0 + 1
    level = levels * 0
    while level < levels:
        chance *= tl.minimum(
            _mean(shares, counts, given, row * depths + tl.minimum(level, depths - 1)) * lucky, _HIGHEST
        )
        worth += chance
        level += 1
    return worth


@index_kernel
def choose(
    guesses,
    levels,
    classes,
    luck,
    shares,
    counts,
    given,
    slots,
    bounds,
    looked,
    exists,
    matched,
    class_of_length,
    chosen,
    stride_guesses,
    width,
    longest,
    depths,
    guessed,
):
    """Grid (R)."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    if slot < 0:
        tl.store(chosen + request, tl.zeros([], tl.uint8))
        return
    bound = tl.load(bounds + request)
    column = tl.arange(0, NODES)
    inside = column < width
    looked_W = tl.load(looked + request * width + column, mask=inside, other=0)
    tl.store(guesses + (2 * slot + 1) * stride_guesses + column, looked_W, mask=inside)
    exists_W = tl.load(exists + request * width + column, mask=inside, other=0)
    found = tl.minimum(tl.sum(exists_W.to(tl.int64), 0), bound)
    row = tl.load(class_of_length + tl.minimum(tl.load(matched + request), longest))
    tl.store(levels + 2 * slot, found * 0)
    tl.store(levels + 2 * slot + 1, found)
    tl.store(classes + 2 * slot, found * 0)
    tl.store(classes + 2 * slot + 1, row)
    share = tl.load(shares + slot)
    guesses_worth = _worth(
        luck + 4 * slot, share, counts, given, row * 0, tl.minimum(tl.minimum(bound, guessed), width), depths
    )
    looked_worth = _worth(luck + 4 * slot + 2, share, counts, given, row, found, depths)
    tl.store(chosen + request, (looked_worth > guesses_worth).to(tl.uint8))


@index_kernel
def learn(
    guesses,
    levels,
    classes,
    luck,
    shares,
    counts,
    given,
    news,
    slots,
    emitted,
    counts_emitted,
    stride_guesses,
    stride_emitted,
    depths,
):
    """Grid (R, 2): a program for each request and source. news: like counts, and 0 before."""
    request, source = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + request)
    if slot < 0:
        return
    own = 2 * slot + source
    row, share = tl.load(classes + own), tl.load(shares + slot)
    least = tl.minimum(tl.load(levels + own), tl.load(counts_emitted + request))
    level, right = least * 0, least * 0
    expected = tl.load(luck + 2 * own) * 0
    checked = level
    while level < least:
        place = row * depths + tl.minimum(level, depths - 1)
        expected += _mean(share, counts, given, place)
        guess, token = (
            tl.load(guesses + own * stride_guesses + level),
            tl.load(emitted + request * stride_emitted + level),
        )
        same = (guess == token).to(tl.int64)
        if share != 0:
            tl.atomic_add(news + 2 * place, same)
            tl.atomic_add(news + 2 * place + 1, same * 0 + 1)
        right += same
        checked += 1
        level = tl.where(same == 1, level + 1, least)
    if checked > 0:
        tl.store(luck + 2 * own, tl.load(luck + 2 * own) * _MEMORY + right.to(tl.float32))
        tl.store(luck + 2 * own + 1, tl.load(luck + 2 * own + 1) * _MEMORY + expected)
    tl.store(levels + own, least * 0)


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
    looked_RW, exists_RW, bounds_R = looked_RW.contiguous(), exists_RW.contiguous(), bounds_R.contiguous()
    chosen_R = torch.empty(len(slots_R), dtype=torch.bool, device=slots_R.device)
    choose[(len(slots_R),)](
        *_of(tables),
        slots_R.contiguous(),
        bounds_R,
        looked_RW,
        exists_RW.view(torch.uint8),
        matched_R,
        class_of_length,
        chosen_R.view(torch.uint8),
        tables.guesses_S2W.shape[2],
        looked_RW.shape[1],
        len(class_of_length) - 1,
        tables.given_CD.shape[1],
        guessed,
        num_warps=_WARPS,
    )
    return chosen_R


def learn_sources(
    tables: SourceTables, slots_R: torch.Tensor, emitted_RK: torch.Tensor, counts_R: torch.Tensor
) -> None:
    emitted_RK = emitted_RK.contiguous()
    news_CD2 = torch.zeros_like(tables.counts_CD2)
    learn[(len(slots_R), 2)](
        *_of(tables),
        news_CD2,
        slots_R.contiguous(),
        emitted_RK,
        counts_R.contiguous(),
        tables.guesses_S2W.shape[2],
        emitted_RK.stride(0),
        tables.given_CD.shape[1],
        num_warps=_WARPS,
    )
    tables.counts_CD2.add_(news_CD2)
    halve(tables)


def _of(tables: SourceTables) -> tuple[torch.Tensor, ...]:
    return (
        tables.guesses_S2W,
        tables.levels_S2,
        tables.classes_S2,
        tables.luck_S22,
        tables.shares_S.view(torch.uint8),
        tables.counts_CD2,
        tables.given_CD,
    )
