"""Device code of attention over paged KV. `attention.py`, which launches it, describes what it computes.

One program takes one tile (some rows of one span), the query heads that share one KV head, and a run of keys. It keeps
the usual three numbers per query vector and goes through the keys block by block:

    peak    highest score so far, times log2(e): weights are powers of two
    total   sum of the weights 2^(score - peak)
    acc     sum of the weighted values

In latent attention a key is a latent and, after it, a tail that is no part of the value: a block of latents is read
once, as keys and as values.

`UNIT` blocks make a split. With fixed splits, each split is summed from zero and then merged into the sum of those
before it, whether one program does both (`attend`) or many programs sum and another merges (`attend`, `merge`).

Bits. The result of a query vector must not depend on its neighbours, so a key that it may not see has weight exactly 0,
a block without visible keys scales by exactly 1, and every a * b + c is either an explicit fma or not fused at all.
Left alone, the compiler fuses where it can, and where it can differs between two compilations of the same line.

Legend: M query vectors of a tile (row-major: row, then head), B keys of a block, D head size, T width of a
tail, both padded to a power of two.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from stridelm.kernels.dependent import wait_for_inputs

LOG2E = tl.constexpr(1.4426950408889634)
PATH_ROWS = tl.constexpr(64)
"""Columns of `paths`: the maximum number of draft rows of a span."""
PREFETCH = tl.constexpr(8)
"""Splits that `merge` prefetches from memory at once."""


PLACES = ["tables", "tile_span", "tile_row", "firsts", "counts", "starts", "reals", "ancestors", "positions", "paths"]
"""Parameters whose addresses differ from step to step: compiled for any, as they are read once per tile."""
NUMBERS = ["table_stride_r", "programs", "splits", "least", "window", "rows"]
"""Numbers that differ from step to step: compiled for any, also for 1, of which Triton would make a constant."""


@triton.jit
def _tile_keys(row, rows, count, start, base, window, BLOCK_B: tl.constexpr, WINDOWED: tl.constexpr):
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
def _splits(low, high, programs, least, UNIT: tl.constexpr):
    """(block at which split 0 begins, blocks per split, splits) for the key blocks [low, high).

    UNIT > 0: splits begin at multiples of UNIT counted from storage index 0, for every caller. UNIT == 0: the keys are
    divided evenly, one split per program, among as many programs as get about `least` blocks each.
    """
    if UNIT > 0:
        origin = low // UNIT * UNIT
        unit = UNIT
    else:
        origin = low
        sharing = tl.minimum((high - low + least // 2) // least, programs)
        unit = tl.cdiv(high - low, tl.maximum(sharing, 1))
    return origin, unit, tl.cdiv(high - origin, unit)


@triton.jit
def _slots(block, table, path, base, high, PAGE: tl.constexpr, BLOCK_B: tl.constexpr, PATHS: tl.constexpr):
    """[B] int32 pool slots of a block's key columns; -1 where there is no key, so that nothing is read."""
    column_B = block * BLOCK_B + tl.arange(0, BLOCK_B)
    exists_B = column_B < high
    stored_B = column_B
    if PATHS:
        # After the real rows, column base + n is the n-th draft row on the row's path.
        step_B = column_B - base
        member_B = tl.load(path + step_B, mask=exists_B & (step_B >= 0), other=-1).to(tl.int32)
        exists_B &= (step_B < 0) | (member_B >= 0)
        stored_B = tl.where(step_B < 0, column_B, base + member_B)
    page_B = tl.load(table + stored_B // PAGE, mask=exists_B, other=0).to(tl.int32)
    return tl.where(exists_B, page_B * PAGE + stored_B % PAGE, -1)


@triton.jit
def _finite(peak_M):
    """A peak that can be subtracted: a query vector that has seen no key has peak -inf, and -inf - -inf is NaN."""
    return tl.where(peak_M == float("-inf"), 0.0, peak_M)


@triton.jit
def _add_block(acc_MD, peak_M, total_M, scores_MB, values_BD, factor, PRECISION: tl.constexpr):
    """Add one key block. factor: what the scores must still be multiplied by, log2(e) included; positive."""
    peak = tl.maximum(peak_M, tl.max(scores_MB, 1) * factor)
    finite = _finite(peak)
    weights_MB = tl.exp2(tl.fma(scores_MB, factor, -finite[:, None]))
    keep_M = tl.exp2(peak_M - finite)
    total = tl.fma(total_M, keep_M, tl.sum(weights_MB, 1))
    acc = tl.dot(weights_MB.to(values_BD.dtype), values_BD, acc_MD * keep_M[:, None], input_precision=PRECISION)
    return acc, peak, total


@triton.jit
def _merge(acc_MD, peak_M, total_M, more_MD, more_peak_M, more_total_M):
    """Sum of earlier splits and the next split. Either may be empty: (0, -inf, 0)."""
    peak = tl.maximum(peak_M, more_peak_M)
    finite = _finite(peak)
    keep_M = tl.exp2(peak_M - finite)
    scale_M = tl.exp2(more_peak_M - finite)
    acc = tl.fma(acc_MD, keep_M[:, None], more_MD * scale_M[:, None])
    return acc, peak, tl.fma(total_M, keep_M, more_total_M * scale_M)


@triton.jit
def _store_rows(out, acc_MD, total_M, row_M, head_M, live_M, dim_D, stride_n, stride_h, D: tl.constexpr):
    """acc / total into the output; rows that see nothing get 0."""
    values_MD = acc_MD / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    at_MD = out + (row_M * stride_n + head_M * stride_h)[:, None] + dim_D[None, :]
    tl.store(at_MD, values_MD.to(out.dtype.element_ty), mask=live_M[:, None] & (dim_D < D)[None, :])


@triton.jit
def _partial(sums, stats, index, query_M, live_M, dim_D, queries, D: tl.constexpr):
    """Pointers to a split's acc and to its peak and total in the workspace, and which of acc's elements exist."""
    at_M = index * queries + query_M
    return (
        sums + at_M[:, None] * D + dim_D[None, :],
        stats + at_M * 2,
        live_M[:, None] & (dim_D < D)[None, :],
    )


@triton.jit
def _store_partial(sums, stats, index, acc_MD, peak_M, total_M, query_M, live_M, dim_D, queries, D: tl.constexpr):
    sums_MD, stats_M, exists_MD = _partial(sums, stats, index, query_M, live_M, dim_D, queries, D)
    tl.store(sums_MD, acc_MD, mask=exists_MD)
    tl.store(stats_M, peak_M, mask=live_M)
    tl.store(stats_M + 1, total_M, mask=live_M)


@triton.jit
def _visible(
    block,
    slot_B,
    own_M,
    bound_M,
    ancestors_M,
    draft_positions,
    base,
    high,
    window,
    BLOCK_B: tl.constexpr,
    WINDOWED: tl.constexpr,
    PATHS: tl.constexpr,
):
    """[M, B]: which query vector sees which key of a block.

    own_M: position of the row. bound_M: it sees all storage below. ancestors_M: bitmask over the draft rows, 0 for
    real rows. draft_positions: pointer to the position of the span's draft row 0; those of the others follow.
    """
    key_B = block * BLOCK_B + tl.arange(0, BLOCK_B)
    position_B = key_B
    if PATHS:
        # The tile is one row, and its columns are the keys it sees, in order of position.
        seen_MB = (slot_B >= 0)[None, :] & (own_M >= 0)[:, None]
    else:
        seen_MB = key_B[None, :] < bound_M[:, None]
        if (high > base) & ((block + 1) * BLOCK_B > base):
            draft_B = key_B - base
            drafted_B = (draft_B >= 0) & (key_B < high)
            bit_B = tl.where(drafted_B, draft_B, 0).to(tl.int64)
            seen_MB |= (((ancestors_M[:, None] >> bit_B[None, :]) & 1) != 0) & drafted_B[None, :]
            if WINDOWED:
                drafted_at_B = tl.load(draft_positions + draft_B, mask=drafted_B, other=0).to(tl.int32)
                position_B = tl.where(drafted_B, drafted_at_B, key_B)
    if WINDOWED:
        seen_MB &= own_M[:, None] - position_B[None, :] < window
    return seen_MB


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=PLACES)
def attend(
    queries,
    turned,
    keys,
    tails,
    values,
    out,
    sums,
    stats,
    tables,
    tile_span,
    tile_row,
    firsts,
    counts,
    starts,
    reals,
    ancestors,
    positions,
    paths,
    query_stride_n,
    query_stride_h,
    turned_stride_n,
    turned_stride_h,
    out_stride_n,
    out_stride_h,
    key_stride_p,
    key_stride_g,
    value_stride_p,
    value_stride_g,
    table_stride_r,
    splits,
    least,
    window,
    factor,
    cap,
    rows,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UNIT: tl.constexpr,
    PARTIAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PATHS: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles, KV heads, programs that share a tile's keys).

    turned, tails: the parts of queries and keys that meet only one another, of width TAIL; None if there are none. With
    them, keys are the values too, the same for all heads, and the second dimension of the grid is groups of HEADS query
    heads. HEADS: otherwise, query heads per KV head. rows: of a tile. splits: room for splits in the workspace. least:
    see `_splits`. PARTIAL: leave splits in the workspace for `merge` instead of writing the output. factor, cap: a
    score is factor * (q . k), or factor * tanh(cap * (q . k)) if CAPPED, in units of ln 2.
    """
    wait_for_inputs(DEPENDENT)
    tile = tl.program_id(0)
    group = tl.program_id(1)
    span = tl.load(tile_span + tile)
    row = tl.load(tile_row + tile).to(tl.int32)
    count = tl.load(counts + span).to(tl.int32)
    if row >= count:
        return
    start = tl.load(starts + span).to(tl.int32)
    real = tl.load(reals + span).to(tl.int32)
    base = start + real
    low, end, high = _tile_keys(row, rows, count, start, base, window, BLOCK_B, WINDOWED)
    origin, unit, number = _splits(low, end, tl.num_programs(2), least, UNIT)
    share = tl.cdiv(number, tl.num_programs(2))
    first_split = tl.program_id(2) * share
    first_block = tl.maximum(origin + first_split * unit, low)
    last_block = tl.minimum(origin + (first_split + share) * unit, end)
    if first_block >= last_block:
        return

    first = tl.load(firsts + span).to(tl.int64)
    query_M = tl.arange(0, BLOCK_M)
    dim_D = tl.arange(0, BLOCK_D)
    in_span_M = row + query_M // HEADS
    live_M = (query_M < rows * HEADS) & (in_span_M < count)
    row_M = first + in_span_M
    head_M = group * HEADS + query_M % HEADS
    q_MD = tl.load(
        queries + (row_M * query_stride_n + head_M * query_stride_h)[:, None] + dim_D[None, :],
        mask=live_M[:, None] & (dim_D < D)[None, :],
        other=0.0,
    )
    dim_T = tl.arange(0, BLOCK_T)
    if turned is not None:
        q_MT = tl.load(
            turned + (row_M * turned_stride_n + head_M * turned_stride_h)[:, None] + dim_T[None, :],
            mask=live_M[:, None] & (dim_T < TAIL)[None, :],
            other=0.0,
        )
    drafted_M = live_M & (in_span_M >= real)
    bound_M = tl.minimum(start + in_span_M + 1, base)
    own_M = start + in_span_M
    ancestors_M = tl.zeros([BLOCK_M], tl.int64)
    if WINDOWED:
        own_M = tl.where(drafted_M, tl.load(positions + row_M, mask=drafted_M, other=0).to(tl.int32), own_M)
    if not PATHS:
        ancestors_M = tl.load(ancestors + row_M, mask=drafted_M, other=0)

    # All rows see every key of the blocks in [open_low, open_high), so these need no mask.
    open_high = tl.minimum(start + row + 1, base) // BLOCK_B
    open_low = 0
    if WINDOWED:
        open_low = tl.cdiv(tl.maximum(high - window, 0), BLOCK_B)

    table = tables + span.to(tl.int64) * table_stride_r
    path = paths + (first + row) * PATH_ROWS
    if turned is None:
        keys += group.to(tl.int64) * key_stride_g
        values += group.to(tl.int64) * value_stride_g
    index = (tile.to(tl.int64) * tl.num_programs(1) + group) * splits

    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    if UNIT > 0 and not PARTIAL:
        sum_MD, sum_peak_M, sum_total_M = acc_MD, peak_M, total_M

    # Slots are looked up one block ahead, so that keys and values need not wait for the table.
    next_B = _slots(first_block, table, path, base, high, PAGE, BLOCK_B, PATHS)
    for block in range(first_block, last_block):
        slot_B = next_B
        exists_BD = (slot_B >= 0)[:, None] & (dim_D < D)[None, :]
        slot_B64 = slot_B.to(tl.int64)  # a pool may have more elements than 32 bits can count
        k_BD = tl.load(keys + (slot_B64 * key_stride_p)[:, None] + dim_D[None, :], mask=exists_BD, other=0.0)
        if turned is None:
            v_BD = tl.load(values + (slot_B64 * value_stride_p)[:, None] + dim_D[None, :], mask=exists_BD, other=0.0)
        else:
            v_BD = k_BD
            tail_BT = tl.load(
                tails + (slot_B64 * key_stride_p)[:, None] + dim_T[None, :],
                mask=(slot_B >= 0)[:, None] & (dim_T < TAIL)[None, :],
                other=0.0,
            )
        next_B = _slots(block + 1, table, path, base, high, PAGE, BLOCK_B, PATHS)

        scores_MB = tl.dot(q_MD, tl.trans(k_BD), input_precision=PRECISION)
        if turned is not None:
            scores_MB = tl.dot(q_MT, tl.trans(tail_BT), scores_MB, input_precision=PRECISION)
        if CAPPED:
            # tanh(x) = 1 - 2 / (1 + e^2x); cap holds 2 log2(e).
            scores_MB = 1.0 - 2.0 / (1.0 + tl.exp2(scores_MB * cap))
        if UNIT > 0:
            # The previous block was the last of its split.
            if (block % UNIT == 0) & (block > first_block):
                if PARTIAL:
                    at = index + (block - 1 - origin) // UNIT
                    _store_partial(sums, stats, at, acc_MD, peak_M, total_M, query_M, live_M, dim_D, rows * HEADS, D)
                else:
                    sum_MD, sum_peak_M, sum_total_M = _merge(sum_MD, sum_peak_M, sum_total_M, acc_MD, peak_M, total_M)
                acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total_M = tl.zeros([BLOCK_M], tl.float32)
        if (block >= open_high) | (block < open_low):
            seen_MB = _visible(
                block,
                slot_B,
                own_M,
                bound_M,
                ancestors_M,
                positions + first + real,
                base,
                high,
                window,
                BLOCK_B,
                WINDOWED,
                PATHS,
            )
            scores_MB = tl.where(seen_MB, scores_MB, float("-inf"))
        acc_MD, peak_M, total_M = _add_block(acc_MD, peak_M, total_M, scores_MB, v_BD, factor, PRECISION)

    if PARTIAL:
        at = index + (last_block - 1 - origin) // unit
        _store_partial(sums, stats, at, acc_MD, peak_M, total_M, query_M, live_M, dim_D, rows * HEADS, D)
    else:
        if UNIT > 0:
            acc_MD, peak_M, total_M = _merge(sum_MD, sum_peak_M, sum_total_M, acc_MD, peak_M, total_M)
        _store_rows(out, acc_MD, total_M, row_M, head_M, live_M, dim_D, out_stride_n, out_stride_h, D)


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
    window,
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
    wait_for_inputs(DEPENDENT)
    tile = tl.program_id(0)
    group = tl.program_id(1)
    span = tl.load(tile_span + tile)
    row = tl.load(tile_row + tile).to(tl.int32)
    count = tl.load(counts + span).to(tl.int32)
    if row + tl.program_id(2) * BLOCK_M // HEADS >= count:
        return
    start = tl.load(starts + span).to(tl.int32)
    base = start + tl.load(reals + span).to(tl.int32)
    low, end, _ = _tile_keys(row, rows, count, start, base, window, BLOCK_B, WINDOWED)
    _, _, number = _splits(low, end, programs, least, UNIT)

    query_M = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim_D = tl.arange(0, BLOCK_D)
    in_span_M = row + query_M // HEADS
    live_M = (query_M < rows * HEADS) & (in_span_M < count)
    index = (tile.to(tl.int64) * tl.num_programs(1) + group) * splits
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    for split in tl.range(0, number, num_stages=PREFETCH):
        sums_MD, stats_M, exists_MD = _partial(sums, stats, index + split, query_M, live_M, dim_D, rows * HEADS, D)
        more_MD = tl.load(sums_MD, mask=exists_MD, other=0.0)
        more_peak_M = tl.load(stats_M, mask=live_M, other=float("-inf"))
        more_total_M = tl.load(stats_M + 1, mask=live_M, other=0.0)
        acc_MD, peak_M, total_M = _merge(acc_MD, peak_M, total_M, more_MD, more_peak_M, more_total_M)

    row_M = tl.load(firsts + span).to(tl.int64) + in_span_M
    head_M = group * HEADS + query_M % HEADS
    _store_rows(out, acc_MD, total_M, row_M, head_M, live_M, dim_D, out_stride_n, out_stride_h, D)
