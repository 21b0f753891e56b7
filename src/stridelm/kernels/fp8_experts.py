"""Products of rows with the matrices, in eight bits, of the experts that they have chosen, on a GPU.

Pairs of a row and an expert are sorted and tiled as in experts.py, and rows are quantised and products added as in
fp8.py: once for all experts of a row, and again between the two products. Every tile has at least 64 outputs, which is
what one kind of instruction takes, so that all tiles give the same bits. All of a launch are of one height: the sums of
a tall one fill so many registers that fewer of the low ones would run beside one another. Of few rows each pair has a
tile of its own, of eight rows, the fewest that an instruction takes, and two blocks of inputs at a time.

Legend: as in experts.py and fp8.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, nearly_done, wait_for_inputs
from stridelm.kernels.expert_pairs import Tiled, one_height, rows_of_tile, tile_of
from stridelm.kernels.experts import dense_rows, parts_by
from stridelm.kernels.fp8 import DTYPES
from stridelm.kernels.fp8_sums import factors, scales_of_block, scales_of_outputs, sums_by_block, sums_of_several
from stridelm.kernels.plain_fp8 import BLOCK, fits, rows_per_scale
from stridelm.kernels.products import Tile, described, finished_tile, store_tile
from stridelm.kernels.quantise import destination, empty_rows, quantised, store_quantised_tile
from stridelm.kernels.row_forms import QuantisedRows, RowForm, Rows

FEW_PAIRS = 8
"""Of an expert, on average. With more, tiles of two stages make gated rows 3% faster; with fewer, up to 3% slower (one
H100, gpu_kernels.py fp8_expert_tiles)."""
MAX_QUANTISED_HEIGHT = 32
"""Of tiles whose gated rows are quantised as they are made."""


@triton.jit(do_not_specialize=["rows", "places"])
def _product_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    pairs,
    table,
    y,
    y_scales,
    rows,
    places,
    inputs,
    outputs,
    blocks,
    each,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    SORTED: tl.constexpr,
    DTYPE: tl.constexpr,
    POWERS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of outputs, T). As in experts.py; x has `rows` rows or places. y_scales: if given, a gated row is
    rounded to DTYPE and quantised, a tile's outputs by one scale; y has `places` rows then."""
    if ACTIVATION is not None:
        wait_for_inputs(DEPENDENT)
    height, expert, place = tile_of(table, tl.program_id(1), R, 1, SORTED)
    if height == 0:
        wait_for_inputs(DEPENDENT)
        return
    source_R, target_R, exists_R = rows_of_tile(place, pairs, each, R, SORTED, ACTIVATION)
    first = tl.program_id(0) * B
    top, up_top = expert * outputs + first, 0
    if ACTIVATION is not None:
        top += expert * outputs
        up_top = top + outputs
    end = top - first + outputs
    at_B = scales_of_outputs(weight_scales, top, end, blocks, B, G)
    up_at_B = at_B
    if ACTIVATION is not None:
        up_at_B = scales_of_outputs(weight_scales, up_top, end + outputs, blocks, B, G)
    if SORTED:
        sum_BR, up_BR = sums_by_block(
            x, x_scales, source_R, exists_R, weight, at_B, up_at_B, top, up_top, None, rows, inputs, 0, inputs,
            B, R, BY_BLOCK, False, ACTIVATION is not None, True, DEPENDENT and ACTIVATION is None,
        )  # fmt: skip
    else:
        source = place  # gated rows wait again, which costs nothing: this is the form that was measured
        if ACTIVATION is not None:
            source = place // each
        sum_BR, up_BR = sums_of_several(
            x, x_scales, weight, at_B, up_at_B, top, up_top, source, source + 1, rows, inputs, blocks, 0, inputs,
            B, R, K, BY_BLOCK, ACTIVATION is not None, DEPENDENT,
        )  # fmt: skip
    nearly_done(DEPENDENT)
    if not BY_BLOCK:
        scale_R, scale_B, up_scale_B = scales_of_block(x_scales + source_R, exists_R, rows, at_B, up_at_B, 0)
        sum_BR *= factors(scale_B, scale_R, False)
        if ACTIVATION is not None:
            up_BR *= factors(up_scale_B, scale_R, False)
    output_B = first + tl.arange(0, B)
    if y_scales is None:
        store_tile(y, sum_BR, up_BR, None, output_B, outputs, target_R, exists_R, ACTIVATION)
    else:
        made_BR = finished_tile(sum_BR, up_BR, None, output_B, outputs, DTYPE, ACTIVATION).to(DTYPE)
        store_quantised_tile(
            made_BR, y, y_scales, places, tl.program_id(0), output_B, outputs, target_R, exists_R, POWERS
        )


def choose_tile(order: Tiled, is_gated: bool, *, quantised: bool = False) -> Tile:
    """All give the same bits. quantised: a tile has all outputs that share a scale."""
    height = order.heights.tallest
    if not order.is_sorted:  # a pair alone: its programs are bound by how fast they run through the weight
        return Tile(64, 8, 2 * BLOCK, warps=4, stages=3)
    if quantised:
        return Tile(BLOCK, height, BLOCK, warps=8, stages=2 if order.mean > FEW_PAIRS else 3)
    if height < 128:
        stages = 3 if height == 16 else 6
        return Tile(64, height, BLOCK, warps=4, stages=4 if is_gated else stages)
    return Tile(64 if is_gated else 128, height, BLOCK, warps=8, stages=3)


def expert_parts(
    x_NH: QuantisedRows,
    chosen_NK: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    activation: str,
    form: RowForm,
) -> torch.Tensor:
    """[N, K, H]: down(activation(gate x) * up x) of each of a row's experts (`ExpertProducts`).

    gate_up, down: weights and their scales; needs fp8.can_multiply of both. chosen: int64, from 0 to E - 1. x: in the
    form that gate_up asks for (`form_of`). form: the one that down asks for.
    """

    def by(x: Rows, weight: torch.Tensor, scale: torch.Tensor, form: RowForm, *asked: Any) -> None:
        multiply(quantised(x, form), weight, scale, *asked)

    inner_rows = partial(_inner_rows, form)
    return parts_by(by, x_NH, chosen_NK, (*gate_up, x_NH.form), (*down, form), activation, inner_rows, one_height)


def _inner_rows(form: RowForm, order: Tiled, width: int, dtype: torch.dtype) -> Rows:
    """Memory for gated rows: quantised by the product that makes them where its tiles are few enough rows high to have
    all outputs that share a scale."""
    if form.by_block and order.is_sorted and order.heights.tallest <= MAX_QUANTISED_HEIGHT:
        return empty_rows((order.places, width), form, dtype, order.table.device)
    return dense_rows(order, width, dtype)


def multiply(
    x: QuantisedRows,
    weight: torch.Tensor,
    scale: torch.Tensor,
    order: Tiled,
    each: int,
    y: Rows,
    activation: str | None,
    tile: Tile | None = None,
) -> None:
    """Write the products of all pairs to y: with an activation from rows to gated places, without from places to pairs.
    Places without a pair are quantised too, whatever they hold, and read by nobody."""
    outputs, blocks = y.shape[1], scale.shape[1]
    assert x.q_NI.is_contiguous() and fits(x.form, scale, x.shape[1])
    out, out_scales, share, powers = destination(y, BLOCK)
    tile = tile or choose_tile(order, activation is not None, quantised=out_scales is not None)
    assert out_scales is None or tile.outputs == share
    _product_kernel[triton.cdiv(outputs, tile.outputs), order.tiles](
        x.q_NI,
        x.scales_SN,
        described(weight, tile.outputs, tile.inputs),
        scale,
        order.pairs,
        order.table,
        out,
        out_scales,
        x.shape[0],
        order.places,
        x.shape[1],
        outputs,
        blocks,
        each,
        tile.outputs,
        tile.rows,
        tile.inputs,
        rows_per_scale(weight.shape[0], scale.shape[0]),
        x.form.by_block,
        order.is_sorted,
        DTYPES[x.dtype],
        powers,
        activation,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(scale.device),
    )
