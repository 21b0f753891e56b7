"""Products of rows with the matrices of the experts that they have chosen, on a GPU.

A pair is a row and one of its experts. Few rows are multiplied pair by pair, so that a step reads the matrices of the
chosen experts alone and needs no launch to find out which rows share one. Pairs of more rows are first sorted by
expert, each expert's filled up to whole tiles. Nothing is read on the host, and every launch's shape depends on the
number of rows alone, so launches can be captured: a tile beyond the last one in use ends at once.

Products add as in products.py, first to last, whatever the tile and whoever is in it. So a row's bits depend neither on
the rows that share its experts nor on their number, and there is no other, faster mode.

Legend: N rows, K experts that a row has chosen, P = N K pairs, E experts, H width, I an expert's inner width; T tiles;
in kernels B outputs of a tile, R pairs of a tile, K inputs of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, wait_for_inputs
from stridelm.kernels.processors import multiprocessors
from stridelm.kernels.products import Tile, described, store_tile, tile_height
from stridelm.kernels.row_forms import Rows

MAX_UNSORTED_ROWS = 4
"""Rows up to which pairs are not sorted: few of them share an expert, and a second reader may find it in the cache."""
SORT_BLOCK = 4096
"""Pairs that a program of the sort looks at at once."""


@triton.jit(do_not_specialize=["count", "tiles"])
def _sort_kernel(
    chosen,
    pairs,
    tile_experts,
    count,
    tiles,
    E: tl.constexpr,
    BINS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (E,): each program counts all experts' pairs and then places its own, in their order. Places that no pair
    has get -1, and so do tiles that no expert has."""
    wait_for_inputs(DEPENDENT)
    expert = tl.program_id(0)
    bin_E = tl.arange(0, BINS)
    entry_B = tl.arange(0, BLOCK)
    counts_E = tl.zeros([BINS], tl.int32)
    for start in range(0, count, BLOCK):
        id_B = tl.load(chosen + start + entry_B, mask=start + entry_B < count, other=E)  # bin E is read by nobody
        counts_E += tl.histogram(id_B.to(tl.int32), BINS)
    tiles_E = tl.where(bin_E < E, (counts_E + R - 1) // R, 0)
    first = tl.sum(tl.where(bin_E < expert, tiles_E, 0), 0)
    mine = tl.sum(tl.where(bin_E == expert, counts_E, 0), 0)
    placed = first * R
    for start in range(0, count, BLOCK):
        id_B = tl.load(chosen + start + entry_B, mask=start + entry_B < count, other=E)
        is_mine_B = (id_B == expert).to(tl.int32)
        tl.store(pairs + placed + tl.cumsum(is_mine_B, 0) - 1, start + entry_B, mask=is_mine_B > 0)
        placed += tl.sum(is_mine_B, 0)
    own = (mine + R - 1) // R
    rest_R = mine + tl.arange(0, R)
    tl.store(pairs + first * R + rest_R, -1, mask=rest_R < own * R)
    for start in range(0, own, BLOCK):
        tl.store(tile_experts + first + start + entry_B, expert, mask=start + entry_B < own)
    if expert == E - 1:
        for start in range(first + own, tiles, BLOCK):
            tl.store(tile_experts + start + entry_B, -1, mask=start + entry_B < tiles)


@triton.jit
def rows_of_tile(tile, pairs, each, R: tl.constexpr, SORTED: tl.constexpr, ACTIVATION: tl.constexpr):
    """(row of x, row of y, whether there is one) of each of a tile's pairs; unsorted, a tile has one pair. With an
    ACTIVATION a pair reads its row of x, and y is by place; without one it reads x by place, and y is by pair."""
    entry_R = tl.arange(0, R)
    if SORTED:
        place_R = tile * R + entry_R
        pair_R = tl.load(pairs + place_R)
    else:
        place_R = tile + entry_R
        pair_R = tl.where(entry_R == 0, tile, -1)
    exists_R = pair_R >= 0
    if ACTIVATION is not None:
        source_R, target_R = pair_R // each, place_R
    else:
        source_R, target_R = place_R, pair_R
    return source_R, target_R, exists_R


@triton.jit
def write_pairs(
    x,
    weight,
    pairs,
    experts,
    y,
    tile,
    first,
    inputs,
    outputs,
    each,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SORTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """A tile of y: outputs from `first` on, of the tile's pairs, which share an expert. Its matrix is one of those that
    `weight` has below one another. With an ACTIVATION a matrix holds gate above up, and y is the gated product."""
    expert = tl.load(experts + tile).to(tl.int32)
    if expert >= 0:
        source_R, target_R, exists_R = rows_of_tile(tile, pairs, each, R, SORTED, ACTIVATION)
        top = first
        if ACTIVATION is not None:
            top += expert * outputs * 2
        else:
            top += expert * outputs
        input_K = tl.arange(0, K)
        x_RK = x + source_R.to(tl.int64)[:, None] * inputs + input_K[None, :]
        sum_BR = tl.zeros([B, R], tl.float32)
        up_BR = sum_BR
        for k in range(0, inputs, K):
            loaded_RK = tl.load(x_RK + k, mask=exists_R[:, None] & (k + input_K < inputs)[None, :], other=0.0)
            sum_BR = tl.dot(weight.load([top, k]), loaded_RK.T, sum_BR)
            if ACTIVATION is not None:
                up_BR = tl.dot(weight.load([top + outputs, k]), loaded_RK.T, up_BR)
        output_B = first + tl.arange(0, B)
        store_tile(y, sum_BR, up_BR, None, output_B, outputs, target_R, exists_R, ACTIVATION)


@triton.jit
def _product_kernel(
    x,
    weight,
    pairs,
    experts,
    y,
    inputs,
    outputs,
    each,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SORTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of outputs, T)."""
    wait_for_inputs(DEPENDENT)
    tile, first = tl.program_id(1), tl.program_id(0) * B
    write_pairs(x, weight, pairs, experts, y, tile, first, inputs, outputs, each, B, R, K, SORTED, ACTIVATION)


@dataclass(frozen=True)
class Sorted:
    """Pairs by expert, in tiles."""

    height: int
    """Pairs of a tile (R)."""
    pairs: torch.Tensor
    """[T R] int32, -1 where there is none; empty if each tile has one pair."""
    experts: torch.Tensor
    """[T] each tile's expert; -1 for a tile that is not in use."""
    mean: int
    """Pairs of an expert on average, rounded up."""

    @property
    def tiles(self) -> int:
        return self.experts.shape[0]

    @property
    def is_sorted(self) -> bool:
        return self.pairs.shape[0] > 0

    @property
    def places(self) -> int:
        """Rows of a tensor by place."""
        return self.pairs.shape[0] or self.tiles


def sort_pairs(chosen_NK: torch.Tensor, experts: int) -> Sorted:
    """The pairs of a step; on the device, nothing is known of them here."""
    count = chosen_NK.numel()
    mean = -(-count // experts)
    if len(chosen_NK) <= MAX_UNSORTED_ROWS:
        return Sorted(16, chosen_NK.new_empty(0, dtype=torch.int32), chosen_NK.view(-1), mean)
    height = height_of(mean)
    tiles = min(count, count // height + experts)  # each expert's last tile may be nearly empty
    pairs = chosen_NK.new_empty(tiles * height, dtype=torch.int32)
    tile_experts = chosen_NK.new_empty(tiles, dtype=torch.int32)
    block = min(SORT_BLOCK, triton.next_power_of_2(count))
    _sort_kernel[(experts,)](
        chosen_NK,
        pairs,
        tile_experts,
        count,
        tiles,
        experts,
        triton.next_power_of_2(experts + 1),
        height,
        block,
        num_warps=4 if block <= 1024 else 8,
        **dependent(chosen_NK.device),
    )
    return Sorted(height, pairs, tile_experts, mean)


def height_of(mean: int) -> int:
    """Of tiles: as many pairs as an expert has on average."""
    return tile_height(mean)


def choose_tile(order: Sorted, outputs: int, is_gated: bool, device: torch.device, beside: int = 0) -> Tile:
    """The fastest measured on an H200 or H100 (benchmarks/gpu_kernels.py expert_tiles). All give the same bits. beside:
    programs that the same launch has for other products."""
    height = order.height
    if height == 128:
        return Tile(128, height, 64, warps=8, stages=3 if is_gated else 4)
    if height == 16:
        # Unsorted tiles that outnumber processors have two stages, so that several programs wait for memory on each.
        many = order.tiles * triton.cdiv(outputs, 64) + beside > multiprocessors(device)
        several = is_gated and many and not order.is_sorted
        return Tile(64, height, 128, warps=4, stages=2 if several else 4)
    return Tile(64, height, 64, warps=4, stages=4)


def dense_rows(order: Sorted, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a row in each place."""
    return torch.empty(order.places, width, dtype=dtype, device=order.experts.device)


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
    inner_rows: Callable[[Sorted, int, torch.dtype], Rows] = dense_rows,
) -> torch.Tensor:
    """`expert_parts` by two calls of `multiply`, which takes these after the rows: first the matrix of all experts.
    inner_rows: memory for gated rows, by places, width and dtype."""
    (rows, each), (width, inner) = chosen_NK.shape, (x_NH.shape[1], down[0].shape[1])
    parts_NKH = torch.empty(rows, each, width, dtype=x_NH.dtype, device=chosen_NK.device)
    if not rows:
        return parts_NKH
    order = sort_pairs(chosen_NK.contiguous(), down[0].shape[0] // width)
    inner_TI = inner_rows(order, inner, x_NH.dtype)
    multiply(x_NH, *gate_up, order, each, inner_TI, activation)
    multiply(inner_TI, *down, order, each, parts_NKH.view(-1, width), None)
    return parts_NKH


def multiply(
    x: torch.Tensor, weight: torch.Tensor, order: Sorted, each: int, y: torch.Tensor, activation: str | None
) -> None:
    """Write the products of all pairs to y: with an activation from rows to gated places, without from places to
    pairs."""
    outputs = y.shape[1]
    tile = choose_tile(order, outputs, activation is not None, x.device)
    _product_kernel[triton.cdiv(outputs, tile.outputs), order.tiles](
        x,
        described(weight, tile.outputs, tile.inputs),
        order.pairs,
        order.experts,
        y,
        x.shape[1],
        outputs,
        each,
        tile.outputs,
        tile.rows,
        tile.inputs,
        order.is_sorted,
        activation,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x.device),
    )
