"""Matrix products of eight-bit floats (e4m3).

A weight has a scale for every G rows and every 128 columns, and a row of x one for every 128 columns: the products of
128 columns are summed by the tensor cores, multiplied by both scales and added in float32, first block to last. Or a
weight has one scale for each of its rows, and x one for each of its own; then sums are multiplied at the end, but still
taken 128 columns at a time, since some tensor cores keep fewer bits of a sum than float32 has.

Every tile adds in the same order, and a row is quantised by itself, so a row's bits do not depend on the rows beside it
(as in products.py; tests/gpu/test_gpu_fp8.py checks that all tiles agree). Fast products need not: sums of few rows are
taken in parts, because each block waits for its scales and for the sum so far, and the few programs that run through
long rows of a weight would not use the memory's bandwidth; and many rows are the tall side of their tiles, which may
round otherwise.

Legend: N rows, I input width, O output width, S scales of a weight's columns; in kernels B outputs of a tile, R rows of
a tile, K columns of one product, one block or several.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stridelm.kernels.dependent import dependent, nearly_done
from stridelm.kernels.fp8_sums import (
    factors,
    is_last_of,
    scales_of_block,
    scales_of_outputs,
    sum_of_parts,
    sums_by_block,
    sums_of_several,
)
from stridelm.kernels.plain_fp8 import BLOCK, fits, rows_per_scale
from stridelm.kernels.processors import multiprocessors
from stridelm.kernels.products import Tile, can_tile, described, finished_tile, store_tile, tile_height
from stridelm.kernels.quantise import destination, empty_rows, store_quantised_tile
from stridelm.kernels.row_forms import QuantisedRows, RowForm, Rows

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""Of rows and results."""
FUSED_ROWS = 64
"""Up to this many rows the gated product is one launch."""
FEW_ROWS = 64
"""Up to this many rows a product is bound by how fast its programs run through the weight."""
_BLOCK = tl.constexpr(BLOCK)
MOST_PARTS = 8
ROW_TILES = 4
"""Of a product that is taken in parts, at most."""


@triton.jit(do_not_specialize=["rows", "each"])
def _product_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    y,
    y_scales,
    parts,
    arrivals,
    rows,
    inputs,
    outputs,
    blocks,
    each,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TALL: tl.constexpr,
    DTYPE: tl.constexpr,
    POWERS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of outputs, tiles of rows, parts of the sum). K: columns of one product. ACTIVATION: as in
    products.py. A part is of `each` blocks, and `parts` has a row's parts one below the other; the last program of a
    tile adds them, if there are `arrivals`. TALL: the rows are the tall side of a tile. y_scales: if given, the result
    is rounded to DTYPE and quantised, a tile's outputs of a row by one scale."""
    first = tl.program_id(0) * B
    first_row = tl.program_id(1) * R
    part = tl.program_id(2)
    row_R = first_row + tl.arange(0, R)
    exists_R = row_R < rows
    at_B = scales_of_outputs(weight_scales, first, outputs, blocks, B, G)
    up_first, up_at_B = first, at_B
    if ACTIVATION is not None:
        up_first = outputs + first
        up_at_B = scales_of_outputs(weight_scales, up_first, 2 * outputs, blocks, B, G)
    start = part * each * _BLOCK
    end = tl.minimum(inputs, start + each * _BLOCK)
    if K == _BLOCK:
        sums, up_sums = sums_by_block(
            x, x_scales, row_R, exists_R, weight, at_B, up_at_B, first, up_first, first_row, rows, inputs, start, end,
            B, R, BY_BLOCK, TALL, ACTIVATION is not None, False, DEPENDENT,
        )  # fmt: skip
    else:
        sums, up_sums = sums_of_several(
            x, x_scales, weight, at_B, up_at_B, first, up_first, first_row, rows, rows, inputs, blocks, start, end,
            B, R, K, BY_BLOCK, ACTIVATION is not None, DEPENDENT,
        )  # fmt: skip
    nearly_done(DEPENDENT)
    if not BY_BLOCK:
        scale_R, scale_B, up_scale_B = scales_of_block(x_scales + row_R, exists_R, rows, at_B, up_at_B, 0)
        sums *= factors(scale_B, scale_R, TALL)
        if ACTIVATION is not None:
            up_sums *= factors(up_scale_B, scale_R, TALL)
    if TALL:
        sums, up_sums = sums.T, up_sums.T
    output_B = first + tl.arange(0, B)
    if PARTS > 1:
        exists_B = output_B < outputs
        at_BR = parts + row_R[None, :] * PARTS * outputs + output_B[:, None]
        exists_BR = exists_B[:, None] & exists_R[None, :]
        tl.store(at_BR + part * outputs, sums, mask=exists_BR)
        if arrivals is not None:
            if is_last_of(arrivals, tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), PARTS):
                sums = sum_of_parts(at_BR, exists_BR, outputs, PARTS)
                store_tile(y, sums, up_sums, bias, output_B, outputs, row_R, exists_R, ACTIVATION)
    elif y_scales is None:
        store_tile(y, sums, up_sums, bias, output_B, outputs, row_R, exists_R, ACTIVATION)
    else:
        made_BR = finished_tile(sums, up_sums, bias, output_B, outputs, DTYPE, ACTIVATION).to(DTYPE)
        store_quantised_tile(made_BR, y, y_scales, rows, tl.program_id(0), output_B, outputs, row_R, exists_R, POWERS)


def can_multiply(weight_OI: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels support this weight, with rows of `dtype`, on its device."""
    return dtype in DTYPES and weight_OI.dtype == torch.float8_e4m3fn and can_tile(weight_OI)


def product(
    x_NI: QuantisedRows,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    bias_O: torch.Tensor | None,
    activation: str | None = None,
    *,
    arrivals: torch.Tensor | None = None,
    tile: Tile | None = None,
    parts: int | None = None,
) -> torch.Tensor:
    """x W^T + b: [N, O] in x's dtype. With an activation (of Ops.gate), O = 2 U and the result is the gated product,
    [N, U].

    x: in the form that the weight asks for (`form_of`). scale: [O / G, S] float32. Needs `can_multiply(weight_OI,
    x.dtype)`. arrivals: what `no_arrivals` made, and no other product uses at the same time; if given, the product is a
    fast one, and a row's bits may depend on how many rows are beside it. tile: if not given, `choose_tile`; its
    `inputs` are those of one product, of 1, 2 or 4 blocks. parts: of the sums of a fast product, if it is not for this
    to choose.
    """
    rows, outputs = x_NI.shape[0], weight_OI.shape[0] // (2 if activation else 1)
    y = scale.new_empty(rows, outputs, dtype=x_NI.dtype)
    if rows:
        _launch(x_NI, weight_OI, scale, bias_O, activation, y, arrivals, tile, parts)
    return y


def gated_product(
    x_NI: QuantisedRows,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    bias_O: torch.Tensor | None,
    activation: str,
    form: RowForm,
    *,
    arrivals: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> QuantisedRows:
    """What `product` returns with an activation, quantised in this form, which is by block. tile: of BLOCK outputs."""
    rows, outputs = x_NI.shape[0], weight_OI.shape[0] // 2
    y = empty_rows((rows, outputs), form, x_NI.dtype, scale.device)
    if rows:
        _launch(x_NI, weight_OI, scale, bias_O, activation, y, arrivals, tile, None)
    return y


def number_of_parts(rows: int, weight_OI: torch.Tensor) -> int:
    """Of the sums of a fast product without bias; 1 if it is not taken in parts."""
    (outputs, inputs), device = weight_OI.shape, weight_OI.device
    return _form(rows, outputs, inputs, choose_tile(rows, outputs, False, device), False, device)[0] if rows else 1


def left_in_parts(x_NI: QuantisedRows, weight_OI: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[N, P, O] float32: the parts of such a product, `number_of_parts` of them, for whoever reads them to add, first
    to last."""
    rows, outputs = x_NI.shape[0], weight_OI.shape[0]
    parts = number_of_parts(rows, weight_OI)
    sums_NPO = scale.new_empty(rows, parts, outputs)
    _launch(x_NI, weight_OI, scale, None, None, sums_NPO, None, None, parts)
    return sums_NPO


def _launch(
    x: QuantisedRows,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    bias_O: torch.Tensor | None,
    activation: str | None,
    out: Rows,
    arrivals: torch.Tensor | None,
    tile: Tile | None,
    parts: int | None,
) -> None:
    """out: where the result goes, or parts of it, [N, P, O] in float32, that are left as they are."""
    (rows, inputs), outputs, device, is_left = x.shape, out.shape[-1], scale.device, len(out.shape) == 3
    assert x.q_NI.is_contiguous() and x.scales_SN.is_contiguous()
    assert fits(x.form, scale, inputs)
    y, y_scales, each, powers = destination(out, BLOCK)
    is_gated = activation is not None
    tile = tile or choose_tile(rows, outputs, is_gated, device, quantised=y_scales is not None)
    assert y_scales is None or tile.outputs == each
    tiles, steps = triton.cdiv(outputs, tile.outputs), triton.cdiv(inputs, tile.inputs)
    row_tiles = triton.cdiv(rows, tile.rows)
    several = tile.inputs > BLOCK
    chosen, tall = (1, False) if arrivals is None else _form(rows, outputs, inputs, tile, is_gated, device)
    parts = parts or chosen
    assert parts == 1 or not is_gated  # a gate is applied to whole sums
    assert parts == 1 or is_left or (arrivals is not None and tiles * row_tiles <= len(arrivals))
    sums_NPO = y if is_left else None if parts == 1 else y.new_empty(rows, parts, outputs, dtype=torch.float32)
    _product_kernel[tiles, row_tiles, parts](
        x.q_NI if several else TensorDescriptor(x.q_NI, [rows, inputs], [inputs, 1], [tile.rows, BLOCK]),
        x.scales_SN,
        described(weight_OI, tile.outputs, tile.inputs),
        scale,
        bias_O,
        y,
        y_scales,
        sums_NPO,
        None if parts == 1 else arrivals,
        rows,
        inputs,
        outputs,
        scale.shape[1],
        triton.cdiv(steps, parts) * (tile.inputs // BLOCK),
        tile.outputs,
        tile.rows,
        tile.inputs,
        rows_per_scale(weight_OI.shape[0], scale.shape[0]),
        x.form.by_block,
        parts,
        tall,
        DTYPES[x.dtype],
        powers,
        activation,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(device),
    )


def no_arrivals(device: torch.device) -> torch.Tensor:
    """Counts of the programs that have stored their part of a tile. The last one of each sets its count back, so that
    every product, a captured one too, begins and ends with zeros."""
    return torch.zeros(ROW_TILES * multiprocessors(device), dtype=torch.int32, device=device)


def _form(rows: int, outputs: int, inputs: int, tile: Tile, is_gated: bool, device: torch.device) -> tuple[int, bool]:
    """(parts of the sums, whether rows are the tall side of tiles): the faster way on an H200. Beyond few rows tall
    tiles are, up to 1.5x; between, sums in only two parts are slower than whole ones in tall tiles."""
    several = tile.inputs > BLOCK
    if not several and (rows > FEW_ROWS or (rows > 32 and is_gated)):
        return 1, True
    parts = 1 if is_gated else parts_of(triton.cdiv(outputs, tile.outputs), triton.cdiv(inputs, BLOCK), device)
    return (1, True) if not several and rows > 32 and parts < 4 else (parts, False)


@cache
def parts_of(tiles: int, blocks: int, device: torch.device) -> int:
    """Into how many parts a sum of so many blocks is split: two programs for each processor, of four blocks or more."""
    room = min(MOST_PARTS, blocks // 4, 2 * multiprocessors(device) // tiles)
    return 1 << room.bit_length() - 1 if room else 1


@cache
def choose_tile(rows: int, outputs: int, is_gated: bool, device: torch.device, *, quantised: bool = False) -> Tile:
    """Tiles as for 16-bit weights (products.py), with twice the stages in the same memory; of two blocks for up to 16
    rows. quantised: a tile has all outputs that share a scale."""
    height = tile_height(rows)
    many = outputs >= 128 * multiprocessors(device)
    few = 8 if rows <= 8 else 16
    if quantised and height == 16:
        return Tile(BLOCK, few, 2 * BLOCK, warps=8, stages=3)
    if quantised:
        return Tile(BLOCK, height, BLOCK, warps=8, stages=6 if height < 64 else 4)
    if height == 16 and not (many or is_gated):
        return Tile(64, few, 2 * BLOCK, warps=4, stages=5 if few == 8 else 4)
    if is_gated:
        return Tile(64, min(height, FUSED_ROWS), BLOCK, warps=4, stages=4)
    if height == 128:
        return Tile(128 if many or rows >= 1024 else 64, height, BLOCK, warps=8, stages=4)
    stages = 4 if many else 6 if height == 64 else 8  # two programs on a processor, where there are several parts
    return Tile(128 if many else 64, height, BLOCK, warps=4, stages=stages)
