"""The quantisation of rows to eight-bit floats on a GPU: in launches of its own, or by the kernel that makes the rows.

A row's numbers are first rounded to the dtype that the row would have been stored in, so both ways give the same bits.

Legend: N rows, I width, S scales of a row; in kernels B columns of a row, in G groups of K columns that share a scale.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, give_way, wait_for_inputs
from stridelm.kernels.plain_fp8 import BLOCK, E4M3, LARGEST, LEAST, MANTISSA
from stridelm.kernels.row_forms import QuantisedRows, RowForm, Rows

COLUMNS = 1024
"""That a program quantises at once."""
_LARGEST, _LEAST, _MANTISSA = tl.constexpr(LARGEST), tl.constexpr(LEAST), tl.constexpr(MANTISSA)


@triton.jit
def scale_of(largest, POWERS: tl.constexpr):
    """The scale of numbers with this largest magnitude. POWERS: a power of two."""
    scale = tl.div_rn(tl.maximum(largest, _LEAST), _LARGEST)
    if POWERS:
        scale = ((scale.to(tl.int32, bitcast=True) + _MANTISSA) & ~_MANTISSA).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def store_quantised(x_B, q, scales, row, first, width, B: tl.constexpr, K: tl.constexpr, POWERS: tl.constexpr):
    """Quantise B of a row's columns from `first` on; past its width they are zeros. Scales are stored group by group,
    as tiles of rows read them. Grids have one program for each row on their first axis."""
    x_GK = tl.reshape(x_B.to(tl.float32), [B // K, K])
    scale_G = scale_of(tl.max(tl.abs(x_GK), 1), POWERS)
    group_G = first // K + tl.arange(0, B // K)
    column_GK = group_G[:, None] * K + tl.arange(0, K)[None, :]
    q_GK = tl.div_rn(x_GK, tl.broadcast_to(scale_G[:, None], [B // K, K])).to(tl.float8e4nv)
    tl.store(q + row * width + column_GK, q_GK, mask=column_GK < width)
    tl.store(scales + group_G.to(tl.int64) * tl.num_programs(0) + row, scale_G, mask=group_G * K < width)


@triton.jit
def store_quantised_tile(
    made_BR, y, scales, rows, tile, output_B, outputs, row_R, exists_R, POWERS: tl.constexpr
):  # fmt: skip
    """Quantise the outputs of a tile's rows, which share one scale, and store them. made: [B, R] of the rows' dtype.
    rows: of all tiles; tile: the tile's number among those of other outputs."""
    exists_B = output_B < outputs
    made_BR = made_BR.to(tl.float32)
    scale_R = scale_of(tl.max(tl.where(exists_B[:, None], tl.abs(made_BR), 0.0), 0), POWERS)
    q_BR = tl.div_rn(made_BR, tl.broadcast_to(scale_R[None, :], made_BR.shape)).to(y.dtype.element_ty)
    at_BR = y + row_R.to(tl.int64)[None, :] * outputs + output_B[:, None]
    tl.store(at_BR, q_BR, mask=exists_B[:, None] & exists_R[None, :])
    tl.store(scales + tile.to(tl.int64) * rows + row_R, scale_R, mask=exists_R)


@triton.jit
def _quantise_blocks_kernel(
    x, q, scales, width, B: tl.constexpr, K: tl.constexpr, POWERS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid (N, groups of B columns)."""
    give_way(tl.num_programs(0), DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * B
    column_B = first + tl.arange(0, B)
    x_B = tl.load(x + row * width + column_B, mask=column_B < width, other=0.0)
    store_quantised(x_B, q, scales, row, first, width, B, K, POWERS)


@triton.jit
def _quantise_rows_kernel(x, q, scales, width, B: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid (N,): one scale for the whole row, which is read twice."""
    give_way(tl.num_programs(0), DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.arange(0, B)
    largest_B = tl.zeros([B], tl.float32)
    for start in range(0, width, B):
        exists_B = start + column_B < width
        x_B = tl.load(x + row * width + start + column_B, mask=exists_B, other=0.0).to(tl.float32)
        largest_B = tl.maximum(largest_B, tl.abs(x_B))
    scale = scale_of(tl.max(largest_B, 0), False)
    for start in range(0, width, B):
        exists_B = start + column_B < width
        x_B = tl.load(x + row * width + start + column_B, mask=exists_B, other=0.0).to(tl.float32)
        scaled_B = tl.div_rn(x_B, tl.zeros([B], tl.float32) + scale)
        tl.store(q + row * width + start + column_B, scaled_B.to(tl.float8e4nv), mask=exists_B)
    tl.store(scales + row, scale)


def empty_rows(
    shape: Sequence[int], form: RowForm, dtype: torch.dtype, device: torch.device, *, keeps_dense: bool = False
) -> QuantisedRows:
    """Memory for rows [N, I] of a dtype. keeps_dense: also as they are before they are quantised."""
    rows, width = shape
    groups = triton.cdiv(width, BLOCK) if form.by_block else 1
    q_NI = torch.empty(rows, width, dtype=E4M3, device=device)
    scales_SN = torch.empty(groups, rows, dtype=torch.float32, device=device)
    dense_NI = torch.empty(rows, width, dtype=dtype, device=device) if keeps_dense else None
    return QuantisedRows(q_NI, scales_SN, dtype, form, dense_NI)


class Destination(NamedTuple):
    """Where a kernel stores the rows that it makes."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    """None: it stores them as they are."""
    each: int
    """Columns that share a scale."""
    powers: bool
    """Whether scales are powers of two."""


def destination(out: Rows, block: int) -> Destination:
    """block: columns of a row that a program has."""
    if isinstance(out, torch.Tensor):
        return Destination(out, None, block, False)
    each = min(BLOCK, block) if out.form.by_block else block
    return Destination(out.q_NI, out.scales_SN, each, out.form is RowForm.POWERS)


def quantised(x_NI: Rows, form: RowForm) -> QuantisedRows:
    """The rows in this form, in which they may be already."""
    made = x_NI if isinstance(x_NI, QuantisedRows) else quantise(x_NI, form)
    assert made.form is form
    return made


def quantise(x_NI: torch.Tensor, form: RowForm) -> QuantisedRows:
    rows, width = x_NI.shape
    x_NI, made = x_NI.contiguous(), empty_rows(x_NI.shape, form, x_NI.dtype, x_NI.device)
    if rows == 0:
        return made
    options = dependent(x_NI.device)
    if not form.by_block:
        block = min(4 * COLUMNS, triton.next_power_of_2(width))
        _quantise_rows_kernel[(rows,)](x_NI, made.q_NI, made.scales_SN, width, block, num_warps=8, **options)
        return made
    block = min(COLUMNS, max(BLOCK, triton.next_power_of_2(width)))
    grid = (rows, triton.cdiv(width, block))
    powers = form is RowForm.POWERS
    _quantise_blocks_kernel[grid](x_NI, made.q_NI, made.scales_SN, width, block, BLOCK, powers, num_warps=4, **options)
    return made
