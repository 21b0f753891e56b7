"""Products of rows with the matrices of the experts that they have chosen, on a GPU.

A pair is a row and one of its experts. Few rows are multiplied pair by pair, so that a step reads the matrices of the
chosen experts alone; pairs of more rows in tiles that share an expert (expert_pairs.py). Nothing is read on the host,
and every launch's shape depends on the number of rows alone.

Products add as in products.py, first to last, whatever the tile and whoever is in it. So a row's bits depend neither on
the rows that share its experts nor on their number, and there is no other, faster mode.

Legend: N rows, K experts that a row has chosen, P = N K pairs, E experts, H width, I an expert's inner width; T tiles;
in kernels B outputs of a tile, R pairs of a tile, K inputs of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, nearly_done, once_written, wait_for_inputs
from stridelm.kernels.expert_pairs import HeightsOf, Tiled, rows_of_tile, several_heights, tile_of, tile_pairs
from stridelm.kernels.processors import multiprocessors
from stridelm.kernels.products import described, store_tile
from stridelm.kernels.row_forms import Rows


class PairTile(NamedTuple):
    """Of a launch's tiles, which differ in height alone."""

    outputs: int
    inputs: int
    """Of a block."""
    warps: int
    stages: int
    """Of the lowest tiles."""
    tall_stages: int
    """Of the others."""


@triton.jit
def write_pairs(
    x,
    weight,
    pairs,
    table,
    y,
    tile,
    first,
    inputs,
    outputs,
    each,
    B: tl.constexpr,
    K: tl.constexpr,
    LEAST: tl.constexpr,
    HEIGHTS: tl.constexpr,
    STAGES: tl.constexpr,
    TALL_STAGES: tl.constexpr,
    SORTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of y: outputs from `first` on, of the tile's pairs, which share an expert. Its matrix is one of those that
    `weight` has below one another. With an ACTIVATION a matrix holds gate above up, and y is the gated product; without
    one, the previous kernel has read the same table, which is read before that has ended."""
    if ACTIVATION is not None:
        wait_for_inputs(DEPENDENT)
    height, expert, place = tile_of(table, tile, LEAST, HEIGHTS, SORTED)
    for i in tl.static_range(HEIGHTS):
        if height == LEAST << i:
            _write_tile(
                x, weight, pairs, y, expert, place, first, inputs, outputs, each,
                B, LEAST << i, K, TALL_STAGES if i else STAGES, SORTED, ACTIVATION, DEPENDENT,
            )  # fmt: skip
    wait_for_inputs(DEPENDENT)  # a tile that is not in use has not


@triton.jit
def _write_tile(
    x,
    weight,
    pairs,
    y,
    expert,
    place,
    first,
    inputs,
    outputs,
    each,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    SORTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    source_R, target_R, exists_R = rows_of_tile(place, pairs, each, R, SORTED, ACTIVATION)
    top = first
    if ACTIVATION is not None:
        top += expert * outputs * 2
    else:
        top += expert * outputs
    input_K = tl.arange(0, K)
    x_RK = x + source_R.to(tl.int64)[:, None] * inputs + input_K[None, :]
    sum_BR = tl.zeros([B, R], tl.float32)
    up_BR = sum_BR
    for k in tl.range(0, inputs, K, num_stages=STAGES):
        weight_BK = weight.load([top, k])
        at = k
        if ACTIVATION is not None:  # waited for the table
            up_weight_BK = weight.load([top + outputs, k])
        else:
            at = once_written(at, DEPENDENT)
        loaded_RK = tl.load(x_RK + at, mask=exists_R[:, None] & (k + input_K < inputs)[None, :], other=0.0)
        sum_BR = tl.dot(weight_BK, loaded_RK.T, sum_BR)
        if ACTIVATION is not None:
            up_BR = tl.dot(up_weight_BK, loaded_RK.T, up_BR)
    nearly_done(DEPENDENT)
    output_B = first + tl.arange(0, B)
    store_tile(y, sum_BR, up_BR, None, output_B, outputs, target_R, exists_R, ACTIVATION)


@triton.jit
def _product_kernel(
    x,
    weight,
    pairs,
    table,
    y,
    inputs,
    outputs,
    each,
    B: tl.constexpr,
    K: tl.constexpr,
    LEAST: tl.constexpr,
    HEIGHTS: tl.constexpr,
    STAGES: tl.constexpr,
    TALL_STAGES: tl.constexpr,
    SORTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of outputs, T)."""
    write_pairs(
        x, weight, pairs, table, y, tl.program_id(1), tl.program_id(0) * B, inputs, outputs, each,
        B, K, LEAST, HEIGHTS, STAGES, TALL_STAGES, SORTED, ACTIVATION, DEPENDENT,
    )  # fmt: skip


def choose_tile(order: Tiled, outputs: int, is_gated: bool, device: torch.device, beside: int = 0) -> PairTile:
    """The fastest measured on an H200 or H100 (benchmarks/gpu_kernels.py expert_tiles). All give the same bits. beside:
    programs that the same launch has for other products."""
    if order.heights.least > 16:
        return PairTile(128, 64, warps=8, stages=4 if is_gated else 5, tall_stages=3 if is_gated else 4)
    # Unsorted tiles that outnumber processors have two stages, so that several programs wait for memory on each.
    many = order.tiles * triton.cdiv(outputs, 64) + beside > multiprocessors(device)
    several = is_gated and many and not order.is_sorted
    return PairTile(64, 128, warps=4, stages=2 if several else 4, tall_stages=3)


def dense_rows(order: Tiled, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a row in each place."""
    return torch.empty(order.places, width, dtype=dtype, device=order.table.device)


def expert_parts(
    x_NH: torch.Tensor, chosen_NK: torch.Tensor, gate_up_QH: torch.Tensor, down_RI: torch.Tensor, activation: str
) -> torch.Tensor:
    """[N, K, H]: down(activation(gate x) * up x) of each of a row's experts (`ExpertProducts`). Needs `can_multiply` of
    both weights; x of their dtype; chosen: int64, from 0 to E - 1."""
    return parts_by(multiply, x_NH.contiguous(), chosen_NK, (gate_up_QH,), (down_RI,), activation)


def parts_by(
    multiply: Callable[..., None],
    x_NH: Rows,
    chosen_NK: torch.Tensor,
    gate_up: tuple[Any, ...],
    down: tuple[Any, ...],
    activation: str,
    inner_rows: Callable[[Tiled, int, torch.dtype], Rows] = dense_rows,
    heights_of: HeightsOf = several_heights,
) -> torch.Tensor:
    """`expert_parts` by two calls of `multiply`, which takes these after the rows: first the matrix of all experts.
    inner_rows: memory for gated rows, by places, width and dtype."""
    (rows, each), (width, inner) = chosen_NK.shape, (x_NH.shape[1], down[0].shape[1])
    parts_NKH = torch.empty(rows, each, width, dtype=x_NH.dtype, device=chosen_NK.device)
    if not rows:
        return parts_NKH
    order = tile_pairs(chosen_NK.contiguous(), down[0].shape[0] // width, heights_of)
    inner_TI = inner_rows(order, inner, x_NH.dtype)
    multiply(x_NH, *gate_up, order, each, inner_TI, activation)
    multiply(inner_TI, *down, order, each, parts_NKH.view(-1, width), None)
    return parts_NKH


def multiply(
    x: torch.Tensor, weight: torch.Tensor, order: Tiled, each: int, y: torch.Tensor, activation: str | None
) -> None:
    """Write the products of all pairs to y: with an activation from rows to gated places; without one, in the very next
    launch (`write_pairs`), from places to pairs."""
    outputs = y.shape[1]
    tile = choose_tile(order, outputs, activation is not None, x.device)
    _product_kernel[triton.cdiv(outputs, tile.outputs), order.tiles](
        x,
        described(weight, tile.outputs, tile.inputs),
        order.pairs,
        order.table,
        y,
        x.shape[1],
        outputs,
        each,
        tile.outputs,
        tile.inputs,
        *order.heights,
        tile.stages,
        tile.tall_stages,
        order.is_sorted,
        activation,
        num_warps=tile.warps,
        **dependent(x.device),
    )
