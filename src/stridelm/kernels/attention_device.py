"""Device code of attention over paged KV: one tile. `attention.py`, which launches it, describes what it computes.

One program takes one tile (some rows of one span), the query heads that share one KV head, and a run of keys. It keeps
the usual three numbers per query vector and goes through the keys block by block:

    peak    highest score so far, times log2(e): weights are powers of two
    total   sum of the weights 2^(score - peak)
    acc     sum of the weighted values

Keys and values in eight bits are widened to the queries' dtype, in which they are exact, before they are multiplied.

A key may have a tail, the same for all heads, which meets a part of the query of its own. In latent attention there are
no values: a block of latents, which are keys without their tails, is read once, as keys and as values.

Bits. The result of a query vector must not depend on its neighbours, so a key that it may not see has weight exactly 0,
a block without visible keys scales by exactly 1, and every a * b + c is either an explicit fma or not fused at all.
Left alone, the compiler fuses where it can, and where it can differs between two compilations of the same line.

Legend: M query vectors of a tile (row-major: row, then head), B keys of a block, D head size, T width of a tail, both
padded to a power of two.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from stridelm.kernels.attention_splits import (
    NUMBERS,
    PLACES,
    finite_peak,
    is_merged,
    merged,
    splits_of,
    store_partial,
    store_rows,
    tile_keys,
)
from stridelm.kernels.dependent import give_way, wait_for_inputs

PATH_ROWS = tl.constexpr(64)
"""Columns of `paths`: the maximum number of draft rows of a span."""


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
def _add_block(acc_MD, peak_M, total_M, scores_MB, values_BD, factor, PRECISION: tl.constexpr):
    """Add one key block. factor: what the scores must still be multiplied by, log2(e) included; positive."""
    peak = tl.maximum(peak_M, tl.max(scores_MB, 1) * factor)
    finite = finite_peak(peak)
    weights_MB = tl.exp2(tl.fma(scores_MB, factor, -finite[:, None]))
    keep_M = tl.exp2(peak_M - finite)
    total = tl.fma(total_M, keep_M, tl.sum(weights_MB, 1))
    acc = tl.dot(weights_MB.to(values_BD.dtype), values_BD, acc_MD * keep_M[:, None], input_precision=PRECISION)
    return acc, peak, total


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
    tail_stride_p,
    value_stride_p,
    value_stride_g,
    table_stride_r,
    splits,
    least,
    merging,
    window,
    factor,
    cap,
    value_scale,
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

    turned, tails: the parts of queries and keys that meet only one another, of width TAIL, the tails the same for all
    heads; None if there are none. values: None if keys, without their tails, are the values too, and the same for all
    heads; the second dimension of the grid is then groups of HEADS query heads. HEADS: otherwise, query heads per KV
    head. rows: of a tile. splits: room for splits in the workspace. least, merging: see `splits_of`. PARTIAL: leave
    splits in the workspace for `merge` instead of writing the output, where `is_merged`. factor, cap: a score is
    factor * (q . k), or factor * tanh(cap * (q . k)) if CAPPED, in units of ln 2. value_scale: multiplies the output.
    """
    if PARTIAL:
        give_way(tl.num_programs(0), DEPENDENT)
    tile = tl.program_id(0)
    group = tl.program_id(1)
    span = tl.load(tile_span + tile)
    row = tl.load(tile_row + tile).to(tl.int32)
    count = tl.load(counts + span).to(tl.int32)
    if row >= count:
        wait_for_inputs(DEPENDENT)
        return
    start = tl.load(starts + span).to(tl.int32)
    real = tl.load(reals + span).to(tl.int32)
    base = start + real
    low, end, high = tile_keys(row, rows, count, start, base, window, BLOCK_B, WINDOWED)
    origin, unit, number = splits_of(low, end, tl.num_programs(2), least, merging, UNIT)
    share = tl.cdiv(number, tl.num_programs(2))
    first_split = tl.program_id(2) * share
    first_block = tl.maximum(origin + first_split * unit, low)
    last_block = tl.minimum(origin + (first_split + share) * unit, end)
    if first_block >= last_block:
        wait_for_inputs(DEPENDENT)
        return

    first = tl.load(firsts + span).to(tl.int64)
    query_M = tl.arange(0, BLOCK_M)
    dim_D = tl.arange(0, BLOCK_D)
    in_span_M = row + query_M // HEADS
    live_M = (query_M < rows * HEADS) & (in_span_M < count)
    row_M = first + in_span_M
    head_M = group * HEADS + query_M % HEADS
    table = tables + span.to(tl.int64) * table_stride_r
    path = paths + (first + row) * PATH_ROWS
    if PATHS:
        wait_for_inputs(DEPENDENT)  # they may be the last results before this launch
    next_B = _slots(first_block, table, path, base, high, PAGE, BLOCK_B, PATHS)
    wait_for_inputs(DEPENDENT)
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

    keys += group.to(tl.int64) * key_stride_g
    if values is not None:
        values += group.to(tl.int64) * value_stride_g
    index = (tile.to(tl.int64) * tl.num_programs(1) + group) * splits

    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    if UNIT > 0 and not PARTIAL:
        sum_MD, sum_peak_M, sum_total_M = acc_MD, peak_M, total_M

    # Slots are looked up one block ahead, so that keys and values need not wait for the table.
    for block in range(first_block, last_block):
        slot_B = next_B
        exists_BD = (slot_B >= 0)[:, None] & (dim_D < D)[None, :]
        slot_B64 = slot_B.to(tl.int64)  # a pool may have more elements than 32 bits can count
        k_BD = tl.load(keys + (slot_B64 * key_stride_p)[:, None] + dim_D[None, :], mask=exists_BD, other=0.0)
        k_BD = k_BD.to(q_MD.dtype)
        if values is None:
            v_BD = k_BD
        else:
            v_BD = tl.load(values + (slot_B64 * value_stride_p)[:, None] + dim_D[None, :], mask=exists_BD, other=0.0)
            v_BD = v_BD.to(q_MD.dtype)
        if turned is not None:
            tail_BT = tl.load(
                tails + (slot_B64 * tail_stride_p)[:, None] + dim_T[None, :],
                mask=(slot_B >= 0)[:, None] & (dim_T < TAIL)[None, :],
                other=0.0,
            ).to(q_MD.dtype)
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
                    store_partial(sums, stats, at, acc_MD, peak_M, total_M, query_M, live_M, dim_D, rows * HEADS, D)
                else:
                    sum_MD, sum_peak_M, sum_total_M = merged(sum_MD, sum_peak_M, sum_total_M, acc_MD, peak_M, total_M)
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
        if is_merged(number, UNIT):
            at = index + (last_block - 1 - origin) // unit
            store_partial(sums, stats, at, acc_MD, peak_M, total_M, query_M, live_M, dim_D, rows * HEADS, D)
        else:
            store_rows(out, acc_MD, total_M, value_scale, row_M, head_M, live_M, dim_D, out_stride_n, out_stride_h, D)
    else:
        if UNIT > 0:
            acc_MD, peak_M, total_M = merged(sum_MD, sum_peak_M, sum_total_M, acc_MD, peak_M, total_M)
        store_rows(out, acc_MD, total_M, value_scale, row_M, head_M, live_M, dim_D, out_stride_n, out_stride_h, D)
