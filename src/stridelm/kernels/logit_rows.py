"""What the kernels over logits share: rows of logits are read by a grid of programs, (rows, splits of the vocabulary).

A program goes through its split tile by tile and leaves one entry in a workspace [M, P]; another kernel combines the
splits. They are combined by a maximum or by a sum of integers, so that a row's result depends neither on how it was
split nor on timing.

Legend: M rows, V vocabulary, P splits, T tokens of a tile.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from stridelm.kernels.index_kernel import row_kernel
from stridelm.kernels.processors import multiprocessors

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

TILE = tl.constexpr(1024)
"""Tokens that a program looks at together. The same for all launches, so that all run the same code."""
MAX_SPLITS = tl.constexpr(128)
WARPS = 4
PROGRAMS_PER_PROCESSOR = 8
"""Rows are split until there are about this many programs for each multiprocessor."""

UNIT = tl.constexpr(2.0**40)
"""The mass of the most probable token, as in mass.py."""
LAST = tl.constexpr(2**31 - 1)
"""An id greater than all others."""
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
KEY_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
"""How many high bits of a float32 distinguish all logits of a dtype, in whole digits."""


# Device code


@triton.jit
def _log1p_by_log(x_T):
    """log(1 + x), corrected for the rounding of 1 + x (Goldberg 1991, "What every computer scientist should know about
    floating-point arithmetic", theorem 4)."""
    rounded_T = 1.0 + x_T
    exact_T = rounded_T == 1.0
    return tl.where(exact_T, x_T, tl.log(rounded_T) * (x_T / tl.where(exact_T, 1.0, rounded_T - 1.0)))


@triton.jit
def _plain_exp(x_T):
    return tl.exp(x_T)


# What torch calls on a GPU. The interpreter has no libdevice.
if triton.knobs.runtime.interpret:
    exp, log1p = _plain_exp, _log1p_by_log
else:
    exp, log1p = libdevice.exp, libdevice.log1p


@triton.jit
def my_tiles(vocab):
    """[first, last) tile of this program."""
    tiles = tl.cdiv(vocab, TILE)
    share = tl.cdiv(tiles, tl.num_programs(1))
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, tiles)


@triton.jit
def my_entry():
    """Where this program leaves its split's result: workspaces are [M, P]."""
    return tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def row_entries(splits):
    """([MAX_SPLITS] indices of the splits of a row's results, which of them exist)."""
    split_P = tl.arange(0, MAX_SPLITS)
    return tl.program_id(0) * splits + split_P, split_P < splits


@triton.jit
def load_tile(logits, tile, vocab):
    """(token ids [T], their logits [T] float32, -inf beyond the end)"""
    token_T = tile * TILE + tl.arange(0, TILE)
    return token_T, tl.load(logits + token_T, mask=token_T < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def order_key(logit_T):
    """uint32 that ascends as the logits descend. Its own inverse, on bits."""
    bits_T = (logit_T + 0.0).to(tl.int32, bitcast=True)  # + 0.0: minus zero equals zero
    return tl.where(bits_T < 0, bits_T, bits_T ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def row_peak(peaks, splits):
    """The largest logit of this program's row, from its splits' peaks."""
    entry_P, exists_P = row_entries(splits)
    return tl.max(tl.load(peaks + entry_P, mask=exists_P, other=float("-inf")))


@triton.jit
def mass_of(depth):
    """exp(-depth) in integer units: `masses` in mass.py."""
    return (exp(-depth) * UNIT).to(tl.int64)


@row_kernel("logits", "stride_m", "vocab")
def find_peaks(logits, peaks, slots, log_min_p, stride_m, stride_min_p, vocab):
    """Find each split's largest logit, for rows with min-p; for all rows if there are no slots."""
    row = tl.program_id(0)
    if slots is not None:
        slot = tl.load(slots + row)
        if slot < 0:
            return
        if tl.load(log_min_p + slot * stride_min_p) == float("-inf"):
            return
    first, last = my_tiles(vocab)
    peak_T = tl.full([TILE], float("-inf"), tl.float32)
    for tile in range(first, last):
        _, logit_T = load_tile(logits + row.to(tl.int64) * stride_m, tile, vocab)
        peak_T = tl.maximum(peak_T, logit_T)
    tl.store(peaks + my_entry(), tl.max(peak_T))


# Host code


def check_logits(logits_MV: torch.Tensor) -> tuple[int, int]:
    """(rows, vocabulary)"""
    assert logits_MV.dtype in DTYPES and logits_MV.stride(1) == 1
    rows, vocab = logits_MV.shape
    assert vocab < 2**31 - TILE.value
    return rows, vocab


@cache
def splits_of(rows: int, vocab: int, device: torch.device) -> int:
    """How many programs share a row."""
    return splits_up_to(-(-PROGRAMS_PER_PROCESSOR * multiprocessors(device) // rows), vocab)


def splits_up_to(wanted: int, vocab: int) -> int:
    """So many splits, or as few as have no more tiles each."""
    tiles = -(-vocab // TILE.value)
    share = -(-tiles // min(wanted, tiles, MAX_SPLITS.value))
    return -(-tiles // share)
