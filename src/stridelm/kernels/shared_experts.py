"""Products of few rows with the experts that they have chosen and with an MLP that all rows share, in one launch.

A launch does not use all of a card's bandwidth while its first programs wait for their first weights, nor once the
first have ended, and the shared MLP's two are short. So their tiles are further programs of the experts' two launches.
Tiles are those of products.py and experts.py, and so are a row's bits.

Legend: as in experts.py; S the shared MLP's inner width.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stridelm.kernels.dependent import dependent
from stridelm.kernels.expert_pairs import Tiled
from stridelm.kernels.experts import choose_tile, parts_by, write_pairs
from stridelm.kernels.products import FEW_ROWS, described, tile_height, write_product

MAX_ROWS = FEW_ROWS
"""Beyond it the library is faster for the shared MLP."""


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    weight,
    pairs,
    table,
    y,
    shared_x,
    shared_weight,
    shared_y,
    rows,
    inputs,
    outputs,
    shared_inputs,
    shared_outputs,
    each,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    LEAST: tl.constexpr,
    HEIGHTS: tl.constexpr,
    STAGES: tl.constexpr,
    TALL_STAGES: tl.constexpr,
    SORTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: the shared matrix's tiles of R rows, which are all, and then the experts', T tiles of pairs for each tile
    of outputs."""
    program, shared, tiles = tl.program_id(0), tl.cdiv(shared_outputs, B), tl.cdiv(outputs, B)
    if program < shared:
        write_product(
            shared_x, shared_weight, None, None, shared_y, program * B, 0, rows, shared_inputs, shared_outputs,
            0, B, R, K, ACTIVATION, DEPENDENT, TALL_STAGES if R > LEAST else STAGES,
        )  # fmt: skip
    else:
        tile, first = (program - shared) // tiles, (program - shared) % tiles * B
        write_pairs(
            x, weight, pairs, table, y, tile, first, inputs, outputs, each,
            B, K, LEAST, HEIGHTS, STAGES, TALL_STAGES, SORTED, ACTIVATION, DEPENDENT,
        )  # fmt: skip


class _Product(NamedTuple):
    """The shared MLP's: its rows, its weight and where its results go."""

    x: torch.Tensor
    weight: torch.Tensor
    y: torch.Tensor


def expert_parts_and_shared(
    x_NH: torch.Tensor,
    chosen_NK: torch.Tensor,
    gate_up_QH: torch.Tensor,
    down_RI: torch.Tensor,
    shared_x_NH: torch.Tensor,
    shared_gate_up: torch.Tensor,
    shared_down_HS: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """([N, K, H], [N, H]): what `experts.expert_parts` returns, and down(activation(gate x) * up x) of the shared MLP.

    shared_x: what that reads of each row. shared_gate_up: [2 S, H]. Needs 1 to MAX_ROWS rows, and `can_multiply` of all
    four weights; rows of their dtype.
    """
    rows, width = x_NH.shape
    shared_NS, shared_NH = x_NH.new_empty(rows, shared_down_HS.shape[1]), x_NH.new_empty(rows, width)
    gate_up = gate_up_QH, _Product(shared_x_NH.contiguous(), shared_gate_up, shared_NS)
    down = down_RI, _Product(shared_NS, shared_down_HS, shared_NH)
    return parts_by(_multiply, x_NH.contiguous(), chosen_NK, gate_up, down, activation), shared_NH


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    shared: _Product,
    order: Tiled,
    each: int,
    y: torch.Tensor,
    activation: str | None,
) -> None:
    """What `experts.multiply` writes, and the shared product, gated if there is an activation."""
    (rows, inputs), shared_outputs = shared.x.shape, shared.y.shape[1]
    outputs, device, height = y.shape[1], y.device, tile_height(rows)
    shared_tiles = triton.cdiv(shared_outputs, 64)
    tile = choose_tile(order, outputs, activation is not None, device, beside=shared_tiles)
    assert tile.outputs == 64 and rows <= MAX_ROWS
    _product_kernel[(shared_tiles + triton.cdiv(outputs, tile.outputs) * order.tiles,)](
        x,
        described(weight, tile.outputs, tile.inputs),
        order.pairs,
        order.table,
        y,
        TensorDescriptor(shared.x, [rows, inputs], [inputs, 1], [height, tile.inputs]),
        described(shared.weight, tile.outputs, tile.inputs),
        shared.y,
        rows,
        x.shape[1],
        outputs,
        inputs,
        shared_outputs,
        each,
        tile.outputs,
        height,
        tile.inputs,
        *order.heights,
        tile.stages,
        tile.tall_stages,
        order.is_sorted,
        activation,
        num_warps=tile.warps,
        **dependent(device),
    )
