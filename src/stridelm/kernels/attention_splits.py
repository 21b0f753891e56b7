"""The splits of a tile's keys, on the device: which there are, how their sums are left in a workspace, and the kernel
that merges them.

`UNIT` blocks make a split. With fixed splits, each split is summed from zero and then merged into the sum of those
before it, whether one program does both (`attend` in attention_device.py) or many programs sum and another merges
(`attend`, `merge`).

Legend: as in attention_device.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from stridelm.kernels.dependent import give_way, wait_for_inputs

PREFETCH = tl.constexpr(8)
"""Splits that `merge` prefetches from memory at once."""
PLACES = ["tables", "tile_span", "tile_row", "firsts", "counts", "starts", "reals", "ancestors", "positions", "paths"]
"""Parameters whose addresses differ from step to step: compiled for any, as they are read once per tile."""
NUMBERS = ["table_stride_r", "programs", "splits", "least", "merging", "window", "rows"]
"""Numbers that differ from step to step: compiled for any, also for 1, of which Triton would make a constant."""


@triton.jit
def tile_keys(row, rows, count, start, base, window, BLOCK_B: tl.constexpr, WINDOWED: tl.constexpr):
    """(first key block, one past the last, one past the last key) that any row of the tile sees.

    Row i of a span is stored at start + i, real or draft, and a draft row's ancestors are stored before it.
    """
    high = start + tl.minimum(row + rows, count)
    low = 0
    if WINDOWED:
        # A draft row's position is at least base.
        low = tl.maximum(tl.minimum(start + row, base) - window + 1, 0) // BLOCK_B
    return low, tl.cdiv(high, BLOCK_B), high


@triton.jit
def splits_of(low, high, programs, least, merging, UNIT: tl.constexpr):
    """(block at which split 0 begins, blocks per split, splits) for the key blocks [low, high).

    UNIT > 0: splits begin at multiples of UNIT counted from storage index 0, for every caller. UNIT == 0: the keys are
    divided evenly, one split per program, among as many programs as get about `least` blocks each, or fewer: splits of
    U blocks cost U to read and merging * blocks / U to merge, whose sum is smallest where U is the root of
    merging * blocks, so they are at least that long.
    """
    if UNIT > 0:
        origin = low // UNIT * UNIT
        unit = UNIT
    else:
        origin = low
        sharing = tl.minimum((high - low + least // 2) // least, programs)
        soonest = (tl.sqrt((high - low) * merging) + 0.5).to(tl.int32)
        unit = tl.maximum(tl.cdiv(high - low, tl.maximum(sharing, 1)), soonest)
    return origin, unit, tl.cdiv(high - origin, unit)


@triton.jit
def is_merged(splits, UNIT: tl.constexpr):
    """Whether a tile's splits are left in the workspace. A single one is not: the program that has summed it writes the
    output. (Fixed splits are, all the same, so that there is one way to the bits.)"""
    if UNIT > 0:
        return True
    else:
        return splits > 1


@triton.jit
def finite_peak(peak_M):
    """A peak that can be subtracted: a query vector that has seen no key has peak -inf, and -inf - -inf is NaN."""
    return tl.where(peak_M == float("-inf"), 0.0, peak_M)


@triton.jit
def merged(acc_MD, peak_M, total_M, more_MD, more_peak_M, more_total_M):
    """Sum of earlier splits and the next split. Either may be empty: (0, -inf, 0)."""
    peak = tl.maximum(peak_M, more_peak_M)
    finite = finite_peak(peak)
    keep_M = tl.exp2(peak_M - finite)
    scale_M = tl.exp2(more_peak_M - finite)
    acc = tl.fma(acc_MD, keep_M[:, None], more_MD * scale_M[:, None])
    return acc, peak, tl.fma(total_M, keep_M, more_total_M * scale_M)


@triton.jit
def store_rows(out, acc_MD, total_M, scale, row_M, head_M, live_M, dim_D, stride_n, stride_h, D: tl.constexpr):
    """acc / total * scale into the output; rows that see nothing get 0."""
    values_MD = acc_MD / tl.where(total_M == 0.0, 1.0, total_M)[:, None] * scale
    at_MD = out + (row_M * stride_n + head_M * stride_h)[:, None] + dim_D[None, :]
    tl.store(at_MD, values_MD.to(out.dtype.element_ty), mask=live_M[:, None] & (dim_D < D)[None, :])


@triton.jit
def partial_at(sums, stats, index, query_M, live_M, dim_D, queries, D: tl.constexpr):
    """Pointers to a split's acc and to its peak and total in the workspace, and which of acc's elements exist."""
    at_M = index * queries + query_M
    return (
        sums + at_M[:, None] * D + dim_D[None, :],
        stats + at_M * 2,
        live_M[:, None] & (dim_D < D)[None, :],
    )


@triton.jit
def store_partial(sums, stats, index, acc_MD, peak_M, total_M, query_M, live_M, dim_D, queries, D: tl.constexpr):
    sums_MD, stats_M, exists_MD = partial_at(sums, stats, index, query_M, live_M, dim_D, queries, D)
    tl.store(sums_MD, acc_MD, mask=exists_MD)
    tl.store(stats_M, peak_M, mask=live_M)
    tl.store(stats_M + 1, total_M, mask=live_M)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=PLACES)
def merge(
    out,
    sums,
    stats,
    tile_span,
    tile_row,
    firsts,
    counts,
    starts,
    reals,
    out_stride_n,
    out_stride_h,
    programs,
    splits,
    least,
    merging,
    window,
    value_scale,
    rows,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the splits of a tile, first to last, into the output. Grid (tiles, KV heads, runs of BLOCK_M query
    vectors).

    Which splits exist is computed as in `attend`, so that no other part of the workspace is read. programs: the third
    dimension of `attend`'s grid.
    """
    give_way(tl.num_programs(0), DEPENDENT)
    tile = tl.program_id(0)
    group = tl.program_id(1)
    span = tl.load(tile_span + tile)
    row = tl.load(tile_row + tile).to(tl.int32)
    count = tl.load(counts + span).to(tl.int32)
    if row + tl.program_id(2) * BLOCK_M // HEADS >= count:
        wait_for_inputs(DEPENDENT)
        return
    start = tl.load(starts + span).to(tl.int32)
    base = start + tl.load(reals + span).to(tl.int32)
    low, end, _ = tile_keys(row, rows, count, start, base, window, BLOCK_B, WINDOWED)
    _, _, number = splits_of(low, end, programs, least, merging, UNIT)
    if not is_merged(number, UNIT):
        wait_for_inputs(DEPENDENT)
        return

    query_M = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim_D = tl.arange(0, BLOCK_D)
    in_span_M = row + query_M // HEADS
    live_M = (query_M < rows * HEADS) & (in_span_M < count)
    index = (tile.to(tl.int64) * tl.num_programs(1) + group) * splits
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    wait_for_inputs(DEPENDENT)
    for split in tl.range(0, number, num_stages=PREFETCH):
        sums_MD, stats_M, exists_MD = partial_at(sums, stats, index + split, query_M, live_M, dim_D, rows * HEADS, D)
        more_MD = tl.load(sums_MD, mask=exists_MD, other=0.0)
        more_peak_M = tl.load(stats_M, mask=live_M, other=float("-inf"))
        more_total_M = tl.load(stats_M + 1, mask=live_M, other=0.0)
        acc_MD, peak_M, total_M = merged(acc_MD, peak_M, total_M, more_MD, more_peak_M, more_total_M)

    row_M = tl.load(firsts + span).to(tl.int64) + in_span_M
    head_M = group * HEADS + query_M % HEADS
    store_rows(out, acc_MD, total_M, value_scale, row_M, head_M, live_M, dim_D, out_stride_n, out_stride_h, D)
