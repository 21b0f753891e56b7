"""The searches of truncate.py, all in one launch.

A key is found digit by digit from the highest (radix selection): each program adds up the weights of the tokens that
share the digits found so far, by their next digit; the digit is the one at which the limit is reached. The programs of
a row wait for each other after every digit, and all find the same ones, from the same sums. So they must be running at
once: there are so few that two such launches fit on the processors together. Three that run at once, of engines that
share a card by MPS, could wait for ever.

Legend: as in truncate.py; P programs of a row, D values of a digit, L lanes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from stridelm.kernels.index_kernel import row_kernel
from stridelm.kernels.logit_rows import TILE, mass_of, my_tiles, order_key, splits_up_to
from stridelm.kernels.processors import multiprocessors

LOGITS = tl.constexpr(0)
DEPTHS = tl.constexpr(1)
IDS = tl.constexpr(2)

BITS = tl.constexpr(4)
"""Bits of a digit."""
DIGITS = tl.constexpr(16)
"""D."""
LANES = tl.constexpr(256)
"""Tokens that are looked at together; sums are added up for each lane, and over lanes in the end."""
PARTS = tl.constexpr(TILE.value // LANES.value)
"""Of a tile."""
MOST_BITS = tl.constexpr(64)
"""Of `alive`."""
MAX_TURNS = tl.constexpr(24)
"""Digits of all keys, at most."""
PROGRAMS_PER_PROCESSOR = 2
WARPS, MAX_REGISTERS = 8, 64
"""Of a program, and of a thread: a processor then has room for twice as many programs."""


@triton.jit
def _everywhere():
    """`alive` before a search: all tiles may have a token that counts."""
    return tl.full([], -1, tl.int64)


@triton.jit
def _weights_by_digit(logits, first, last, alive, vocab, heat, peak, low, edge, prefix, shift, KEY: tl.constexpr):
    """([D] the weights of the tokens whose higher digits are `prefix`, by their digit at `shift`, in a row's tiles from
    `first` to `last`; alive).

    alive: a bit for each few of these tiles, 0 if none of their tokens counted at an earlier digit, and so none does at
    this one. After the first digits, few tiles are read. prefix: int64.
    """
    digit_D = tl.arange(0, DIGITS)
    sum_DL = tl.zeros([DIGITS, LANES], tl.int64 if KEY == DEPTHS else tl.int32)
    each = tl.maximum(tl.cdiv(last - first, MOST_BITS), 1)
    left = alive
    for bit in range(tl.cdiv(last - first, each)):
        if ((alive >> bit) & 1) != 0:
            start = first + bit * each
            counted_L = tl.zeros([LANES], tl.int32)
            for part in range(start * PARTS, tl.minimum(start + each, last) * PARTS):
                token_L = part * LANES + tl.arange(0, LANES)
                exists_L = token_L < vocab
                logit_L = tl.load(logits + token_L, mask=exists_L, other=float("-inf")).to(tl.float32)
                if KEY == LOGITS:
                    counts_L = exists_L
                    key_L = order_key(logit_L)
                else:
                    logit_L = tl.div_rn(logit_L, heat)
                    depth_L = peak - logit_L
                    counts_L = logit_L >= low
                    if KEY == DEPTHS:
                        key_L = depth_L.to(tl.uint32, bitcast=True)
                    else:
                        counts_L &= depth_L == edge
                        key_L = token_L.to(tl.uint32)
                counts_L &= (key_L.to(tl.int64) >> (shift + BITS)) == prefix
                if KEY == DEPTHS:
                    weight_L = tl.where(counts_L, mass_of(depth_L), 0)
                else:
                    weight_L = counts_L.to(tl.int32)
                own_L = ((key_L >> shift.to(tl.uint32)) & (DIGITS - 1)).to(tl.int32)
                sum_DL += tl.where(own_L[None, :] == digit_D[:, None], weight_L[None, :], 0)
                counted_L |= counts_L.to(tl.int32)
            if tl.max(counted_L) == 0:
                left &= ~(tl.full([], 1, tl.int64) << bit)
    return tl.sum(sum_DL.to(tl.int64), 1), left


@triton.jit
def _next_digit(sum_D, prefix, rest):
    """(prefix with one digit more, the limit minus the weights of all tokens before it)"""
    upto_D = tl.cumsum(sum_D, 0)
    under_D = upto_D < rest
    digit = tl.minimum(tl.sum(under_D.to(tl.int64)), DIGITS - 1)
    return (prefix << BITS) + digit, rest - tl.max(tl.where(under_D, upto_D, 0))


@triton.jit
def _nucleus_of(sum_D, top_p):
    """The limit of a row's masses."""
    return tl.ceil(tl.sum(sum_D).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)


@triton.jit
def _needed_at_edge(rest, edge):
    """How many of the equals at the edge are needed: the mass before the last of them is below the limit."""
    return tl.cdiv(rest, tl.maximum(mass_of(edge), 1))


@triton.jit
def _logit_of_prefix(prefix, shift):
    """The logit whose key begins with these digits; its bits under `shift` are 0."""
    bits = (prefix << shift).to(tl.int32)
    bits = tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF)
    return (bits >> shift << shift).to(tl.float32, bitcast=True)


@triton.jit
def _depth_of_prefix(prefix):
    """The depth whose key is these digits."""
    return prefix.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _added(sum_D, sums, arrivals, turn):
    """The sums of all of a row's programs: of integers, so that it does not matter which adds first. turn: how often it
    was called before."""
    row, splits = tl.program_id(0), tl.num_programs(1)
    if splits > 1:
        at_D = sums + (row * MAX_TURNS + turn) * DIGITS + tl.arange(0, DIGITS)
        tl.atomic_add(at_D, sum_D, sem="relaxed", scope="gpu")
        tl.debug_barrier()  # all threads' sums come before the one thread's count, which releases them
        everybody = (turn + 1) * splits
        arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu") + 1
        while arrived < everybody:
            arrived = tl.atomic_add(arrivals + row, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()
        sum_D = tl.load(at_D, cache_modifier=".cg")
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
):
    """Write where the rows that ask for it are cut: to lows, edges and lasts, which `begin` has filled in. Grid (M, P);
    all programs of a row must be running at once.

    sums: [M, MAX_TURNS, D] int64, zeros. arrivals: [M] int32, zeros. KEY_BITS: that distinguish two logits.
    """
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
            prefix, alive = tl.zeros([], tl.int64), _everywhere()
            rest = tl.load(top_ks + row)
            for digit in range(KEY_BITS // BITS):
                shift = 32 - (digit + 1) * BITS
                sum_D, alive = _weights_by_digit(
                    logits, first, last, alive, vocab, heat, peak, low, no_edge, prefix, shift, LOGITS
                )
                prefix, rest = _next_digit(_added(sum_D, sums, arrivals, turn), prefix, rest)
                turn += 1
            low = tl.maximum(tl.div_rn(_logit_of_prefix(prefix, 32 - KEY_BITS), heat), low)
            if tl.program_id(1) == 0:
                tl.store(lows + row, low)
    if TOP_P:
        if asks_p:
            prefix, alive = tl.zeros([], tl.int64), _everywhere()
            rest = tl.zeros([], tl.int64)
            for digit in range(32 // BITS):
                shift = 32 - (digit + 1) * BITS
                sum_D, alive = _weights_by_digit(
                    logits, first, last, alive, vocab, heat, peak, low, no_edge, prefix, shift, DEPTHS
                )
                sum_D = _added(sum_D, sums, arrivals, turn)
                if digit == 0:
                    rest = _nucleus_of(sum_D, tl.load(top_ps + row))
                prefix, rest = _next_digit(sum_D, prefix, rest)
                turn += 1
            edge = _depth_of_prefix(prefix)
            rest = _needed_at_edge(rest, edge)
            prefix = tl.zeros([], tl.int64)
            for digit in range(ID_DIGITS):
                shift = (ID_DIGITS - 1 - digit) * BITS
                sum_D, alive = _weights_by_digit(
                    logits, first, last, alive, vocab, heat, peak, low, edge, prefix, shift, IDS
                )
                prefix, rest = _next_digit(_added(sum_D, sums, arrivals, turn), prefix, rest)
                turn += 1
            if tl.program_id(1) == 0:
                tl.store(edges + row, edge)
                tl.store(lasts + row, prefix)


@cache
def programs_of(rows: int, vocab: int, device: torch.device) -> int:
    """P, so that two launches fit on the device at once. The interpreter runs one after another, so none may wait."""
    if device.type != "cuda":
        return 1
    return splits_up_to(max(1, PROGRAMS_PER_PROCESSOR * multiprocessors(device) // rows), vocab)
