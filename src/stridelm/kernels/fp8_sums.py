"""What a program sums in products of eight-bit floats (fp8.py): a tile over some columns, block by block, with scales.

Legend: as in fp8.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from stridelm.kernels.dependent import once_written
from stridelm.kernels.plain_fp8 import BLOCK

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def sums_by_block(
    x, x_scales, row_R, exists_R, weight, at_B, up_at_B, first, up_first, first_row, rows, inputs, start, end,
    B: tl.constexpr, R: tl.constexpr, BY_BLOCK: tl.constexpr, TALL: tl.constexpr, GATED: tl.constexpr,
    GATHERED: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Sums of a tile over the columns from `start` to `end`, and if GATED those of the outputs from `up_first` on: a
    block's product after another. x, of `rows` rows: a descriptor, read from `first_row` on, or a pointer if the tile's
    rows are GATHERED. WAITS: the launch may not have waited before.

    A product is added when the next is about to be made: its scales have come by then, and before the loop, where the
    launch has not waited, none are read."""
    sums = tl.zeros([R, B] if TALL else [B, R], tl.float32)
    up_sums, made, up_made = sums, sums, sums
    scale_R, scale_B = tl.zeros([R], tl.float32), tl.zeros(at_B.shape, tl.float32)
    up_scale_B = scale_B
    if GATHERED:
        input_K = tl.arange(0, _BLOCK)
        x_at_RK = x + row_R.to(tl.int64)[:, None] * inputs + input_K[None, :]
    for k in range(start, end, _BLOCK):
        weight_BK = weight.load([first, k])
        if GATED:
            up_weight_BK = weight.load([up_first, k])
        at = once_written(k, WAITS)
        if GATHERED:
            x_RK = tl.load(x_at_RK + at, mask=exists_R[:, None] & (k + input_K < inputs)[None, :], other=0.0)
        else:
            x_RK = x.load([first_row, at])
        if BY_BLOCK:
            made *= factors(scale_B, scale_R, TALL)
            up_made *= factors(up_scale_B, scale_R, TALL)
            block = at // _BLOCK
            scale_R, scale_B, up_scale_B = scales_of_block(x_scales + row_R, exists_R, rows, at_B, up_at_B, block)
        sums += made
        made = _multiplied(weight_BK, x_RK, TALL)
        if GATED:
            up_sums += up_made
            up_made = _multiplied(up_weight_BK, x_RK, TALL)
    if BY_BLOCK:
        made *= factors(scale_B, scale_R, TALL)
        up_made *= factors(up_scale_B, scale_R, TALL)
    return sums + made, up_sums + up_made


@triton.jit
def sums_of_several(
    x, x_scales, weight, at_B, up_at_B, first, up_first, first_row, end_row, rows, inputs, blocks, start, end,
    B: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BY_BLOCK: tl.constexpr, GATED: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """The same, bit for bit, by one product for D = K / BLOCK blocks: it has S = D R columns, in which the rows of one
    block after another stand, with zeros in place of the other blocks. So the tensor cores, which few rows leave idle,
    make D sums at once, and D blocks share the wait for them. x: a pointer to so many rows, of which the tile's are
    those from `first_row` to `end_row`."""
    D: tl.constexpr = K // _BLOCK
    block_S = tl.arange(0, D * R) // R
    row_S = first_row + tl.arange(0, D * R) % R
    exists_S = row_S < end_row
    input_K = tl.arange(0, K)
    x_at_SK = x + row_S.to(tl.int64)[:, None] * inputs + input_K[None, :]
    reads_SK = exists_S[:, None] & (input_K[None, :] // _BLOCK == block_S[:, None])
    x_at_S, at_B1, up_at_B1 = x_scales + row_S, at_B[:, None], up_at_B[:, None]
    sum_BR, made_BS = tl.zeros([B, R], tl.float32), tl.zeros([B, D * R], tl.float32)
    up_BR, up_made_BS = sum_BR, made_BS
    scale_S, scale_BS = tl.zeros([D * R], tl.float32), tl.zeros([at_B.shape[0], D * R], tl.float32)
    up_scale_BS = scale_BS
    for k in range(start, end, K):
        weight_BK = weight.load([first, k])
        if GATED:
            up_weight_BK = weight.load([up_first, k])
        at = once_written(k, WAITS)
        x_KS = tl.load(x_at_SK + at, mask=reads_SK & (k + input_K < inputs)[None, :], other=0.0).T
        if BY_BLOCK:
            made_BS *= scale_BS * scale_S[None, :]
            up_made_BS *= up_scale_BS * scale_S[None, :]
            scale_S, scale_BS, up_scale_BS = _scales_of_several(
                x_at_S, exists_S, rows, at_B1, up_at_B1, blocks, block_S + at // _BLOCK
            )
        sum_BR = _added_in_turn(sum_BR, made_BS, B, R, D)
        made_BS = tl.dot(weight_BK, x_KS)
        if GATED:
            up_BR = _added_in_turn(up_BR, up_made_BS, B, R, D)
            up_made_BS = tl.dot(up_weight_BK, x_KS)
    if BY_BLOCK:
        made_BS *= scale_BS * scale_S[None, :]
        up_made_BS *= up_scale_BS * scale_S[None, :]
    return _added_in_turn(sum_BR, made_BS, B, R, D), _added_in_turn(up_BR, up_made_BS, B, R, D)


@triton.jit
def _scales_of_several(x_at_S, exists_S, rows, at_B1, up_at_B1, blocks, block_S):
    """As scales_of_block, for several blocks; past the last one nothing is multiplied."""
    block_S = tl.minimum(block_S, blocks - 1)
    scale_S = tl.load(x_at_S + block_S * rows, mask=exists_S, other=0.0)
    return scale_S, tl.load(at_B1 + block_S[None, :]), tl.load(up_at_B1 + block_S[None, :])


@triton.jit
def _added_in_turn(sum_BR, made_BS, B: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """The sum with D blocks' products, first to last."""
    made_BRD = tl.permute(tl.reshape(made_BS, [B, D, R]), (0, 2, 1))
    if D == 2:
        even_BR, odd_BR = tl.split(made_BRD)
        sum_BR = sum_BR + even_BR + odd_BR
    else:
        tl.static_assert(D == 4)
        even_BR2, odd_BR2 = tl.split(tl.reshape(made_BRD, [B, R, 2, 2]))
        first_BR, third_BR = tl.split(even_BR2)
        second_BR, fourth_BR = tl.split(odd_BR2)
        sum_BR = sum_BR + first_BR + second_BR + third_BR + fourth_BR
    return sum_BR


@triton.jit
def _multiplied(weight_BK, x_RK, TALL: tl.constexpr):
    """[B, R], or [R, B] if tall."""
    if TALL:
        made = tl.dot(x_RK, weight_BK.T)
    else:
        made = tl.dot(weight_BK, x_RK.T)
    return made


@triton.jit
def factors(scale_B, scale_R, TALL: tl.constexpr):
    """What such products are multiplied by."""
    if TALL:
        factors = scale_B[None, :] * scale_R[:, None]
    else:
        factors = scale_B[:, None] * scale_R[None, :]
    return factors


@triton.jit
def is_last_of(arrivals, tile, PARTS: tl.constexpr):
    """Whether the other programs of a tile have stored their parts, which this one may then read."""
    tl.debug_barrier()  # all threads' stores come before the one thread's count, which releases them
    is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1
    if is_last:
        tl.store(arrivals + tile, 0)
    return is_last


@triton.jit
def sum_of_parts(at_BR, exists_BR, stride, PARTS: tl.constexpr):
    """First to last, whoever came last; parts lie `stride` numbers apart. Read from the cache that processors share."""
    sum_BR = tl.zeros(at_BR.shape, tl.float32)
    for part in tl.static_range(PARTS):
        sum_BR += tl.load(at_BR + part * stride, mask=exists_BR, other=0.0, cache_modifier=".cg")
    return sum_BR


@triton.jit
def scales_of_outputs(scales, first, end, blocks, B: tl.constexpr, G: tl.constexpr):
    """[1 or B]: where the scales of the tile of outputs from `first` on begin, one for all of them if they lie in one
    group. Outputs past `end` get those of the last."""
    if G % B == 0:
        output_B = first + tl.arange(0, 1)
    else:
        output_B = tl.minimum(first + tl.arange(0, B), end - 1)
    return scales + output_B.to(tl.int64) // G * blocks


@triton.jit
def scales_of_block(x_at_R, exists_R, rows, at_B, up_at_B, block):
    """A tile's scales in one block of columns: its rows', and those of its outputs in both matrices."""
    return tl.load(x_at_R + block * rows, mask=exists_R, other=0.0), tl.load(at_B + block), tl.load(up_at_B + block)
