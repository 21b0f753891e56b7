"""All searches of a row's cut in one launch, for few rows: a launch for each digit takes longer than what it does.

The programs that share a row go through its searches together, and wait for each other after every digit. So all must
be running at once, which the number of programs ensures. All find the same digits, from the same sums.

Legend: as in truncate.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from stridelm.kernels.digits import (
    BITS,
    DEPTHS,
    DIGITS,
    IDS,
    LOGITS,
    depth_of_prefix,
    logit_of_prefix,
    needed_at_edge,
    next_digit,
    nucleus_of,
    weights_by_digit,
)
from stridelm.kernels.index_kernel import row_kernel
from stridelm.kernels.logit_rows import my_tiles, row_entries, splits_up_to
from stridelm.kernels.processors import multiprocessors

FEW_ROWS = 16
"""Rows up to which one launch is faster."""
PROGRAMS_PER_PROCESSOR = 2
MAX_REGISTERS = 128
"""Of a thread: a processor then has room for twice as many programs, so that launches on two streams do not wait for
each other's."""


@triton.jit
def _added(sum_D, sums, arrivals, turn, SHARED: tl.constexpr):
    """The sums of all of a row's programs. turn: how often it was called before. Sums of two turns are kept, since some
    programs still read those of one while others store the next one's."""
    if SHARED:
        row, splits = tl.program_id(0), tl.num_programs(1)
        sums += (turn % 2) * tl.num_programs(0) * splits * DIGITS
        digit_D = tl.arange(0, DIGITS)
        tl.store(sums + (row * splits + tl.program_id(1)) * DIGITS + digit_D, sum_D)
        tl.debug_barrier()  # all threads' stores come before the one thread's count, which releases them
        everybody = (turn + 1) * splits
        arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu") + 1
        while arrived < everybody:
            arrived = tl.atomic_add(arrivals + row, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()
        entry_P, exists_P = row_entries(splits)
        at_PD = sums + entry_P[:, None] * DIGITS + digit_D[None, :]
        sum_D = tl.sum(tl.load(at_PD, mask=exists_P[:, None], other=0, cache_modifier=".cg"), 0)
    return sum_D


@row_kernel("logits", "stride_m", "vocab")
def search(
    logits,
    sums,
    arrivals,
    heats,
    top_ks,
    top_ps,
    peaks,
    lows,
    edges,
    lasts,
    stride_m,
    vocab,
    KEY_BITS: tl.constexpr,
    ID_DIGITS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Grid (M, P). KEY_BITS: that distinguish two logits. arrivals: zeros."""
    row = tl.program_id(0)
    asks_k, asks_p = False, False
    if TOP_K:
        asks_k = tl.load(top_ks + row) > 0
    if TOP_P:
        asks_p = tl.load(top_ps + row) < 1.0
    if not (asks_k or asks_p):
        return
    logits += row.to(tl.int64) * stride_m
    heat, peak, low = tl.load(heats + row), tl.load(peaks + row), tl.load(lows + row)
    first, last = my_tiles(vocab)
    no_edge = float("inf")
    turn = 0
    if TOP_K:
        if asks_k:
            prefix = tl.zeros([], tl.int64)
            rest = tl.load(top_ks + row)
            for digit in range(KEY_BITS // BITS):
                shift = 32 - (digit + 1) * BITS
                sum_D = weights_by_digit(logits, first, last, vocab, heat, peak, low, no_edge, prefix, shift, LOGITS)
                prefix, rest = next_digit(_added(sum_D, sums, arrivals, turn, SHARED), prefix, rest)
                turn += 1
            low = tl.maximum(tl.div_rn(logit_of_prefix(prefix, 32 - KEY_BITS), heat), low)
            if tl.program_id(1) == 0:
                tl.store(lows + row, low)
    if TOP_P:
        if asks_p:
            prefix = tl.zeros([], tl.int64)
            rest = tl.zeros([], tl.int64)
            for digit in range(32 // BITS):
                shift = 32 - (digit + 1) * BITS
                sum_D = weights_by_digit(logits, first, last, vocab, heat, peak, low, no_edge, prefix, shift, DEPTHS)
                sum_D = _added(sum_D, sums, arrivals, turn, SHARED)
                if digit == 0:
                    rest = nucleus_of(sum_D, tl.load(top_ps + row))
                prefix, rest = next_digit(sum_D, prefix, rest)
                turn += 1
            edge = depth_of_prefix(prefix)
            rest = needed_at_edge(rest, edge)
            prefix = tl.zeros([], tl.int64)
            for digit in range(ID_DIGITS):
                shift = (ID_DIGITS - 1 - digit) * BITS
                sum_D = weights_by_digit(logits, first, last, vocab, heat, peak, low, edge, prefix, shift, IDS)
                prefix, rest = next_digit(_added(sum_D, sums, arrivals, turn, SHARED), prefix, rest)
                turn += 1
            if tl.program_id(1) == 0:
                tl.store(edges + row, edge)
                tl.store(lasts + row, prefix)


@cache
def programs_of(rows: int, vocab: int, device: torch.device) -> int:
    """How many programs share a row. The interpreter runs one after another, so that none may wait there."""
    if device.type != "cuda":
        return 1
    return splits_up_to(PROGRAMS_PER_PROCESSOR * multiprocessors(device) // rows, vocab)
