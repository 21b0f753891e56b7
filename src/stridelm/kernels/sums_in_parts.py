"""Products on a GPU whose sums are left in parts, for whoever reads them to add, first to last.

A product of few outputs has few programs, each of which reads its weights one block of inputs after another, and so
few cannot use all of a card's bandwidth. Parts of a sum are taken by different programs.

- A router's scores, which are not rounded to 16 bits: two programs would read all weights for a row. The parts follow
  from the width alone, and so do a row's bits; they are added where the row chooses (triton_router.py).
- What a layer adds to the stream, for few rows where equal bits are not promised: other products add a row's terms
  first to last. The parts are added by the norm that comes next (triton_norms.py).

Legend: N rows, I inputs, O outputs, P parts of a sum; in the kernel B outputs of a tile, R rows of a tile, K inputs of
a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stridelm.kernels.dependent import dependent, give_way, nearly_done, once_written
from stridelm.kernels.processors import multiprocessors
from stridelm.kernels.products import FEW_ROWS, described, tile_height

PART_INPUTS = 256
"""The fewest inputs of a part, whose number is a multiple of this; this is a multiple of every block's."""
MAX_PARTS = 8
"""Of a score."""
OUTPUTS = 64
"""Of a tile."""
BLOCKS = {16: 256, 32: 256, 64: 128, 128: 64}
"""Inputs of a block, by rows of a tile."""
MAX_ADDED_PARTS = 4
"""Of what is added to the stream; as many as there are processors for (`_parts_of`)."""


@triton.jit(do_not_specialize=["rows"])
def _parts_kernel(
    x,
    weight,
    y,
    rows,
    inputs,
    each,
    WIDTH: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    GIVES_WAY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of outputs, tiles of rows, P). each: inputs of a part. WIDTH: O."""
    if GIVES_WAY:
        give_way(rows, DEPENDENT)
    first, first_row = tl.program_id(0) * B, tl.program_id(1) * R
    part, parts = tl.program_id(2), tl.num_programs(2)
    sum_BR = tl.zeros([B, R], tl.float32)
    for k in range(part * each, tl.minimum((part + 1) * each, inputs), K):
        weight_BK = weight.load([first, k])
        sum_BR = tl.dot(weight_BK, x.load([first_row, once_written(k, DEPENDENT)]).T, sum_BR)
    nearly_done(DEPENDENT)
    output_B = first + tl.arange(0, B)
    row_R = first_row + tl.arange(0, R)
    at_BR = y + (row_R.to(tl.int64)[None, :] * parts + part) * WIDTH + output_B[:, None]
    tl.store(at_BR, sum_BR, mask=(output_B < WIDTH)[:, None] & (row_R < rows)[None, :])


def scores(x_NI: torch.Tensor, weight_OI: torch.Tensor, bias: None) -> torch.Tensor:
    """[N, P, O]: a router's, as `Ops.route` takes them. Needs `can_multiply(weight)`, and x of its dtype."""
    each = _each(x_NI.shape[1], MAX_PARTS)
    return _in_parts(x_NI, weight_OI, each, gives_way=True)


def added_parts(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """[N, P, O]: what a layer adds to the stream. Needs `pays_in_parts`, and what `scores` needs."""
    return _in_parts(x_NI, weight_OI, _each(x_NI.shape[1], _parts_of(weight_OI)), gives_way=False)


def pays_in_parts(rows: int, weight_OI: torch.Tensor) -> bool:
    """Whether a product with so many rows is faster in parts, which the next norm adds up: on an H200 those of up to
    4,096 outputs, by 2% to 27% with that norm and in two parts."""
    return 0 < rows <= FEW_ROWS and _parts_of(weight_OI) > 1 and weight_OI.shape[1] >= 4 * PART_INPUTS


def _parts_of(weight_OI: torch.Tensor) -> int:
    """4 or 2, if that many programs for each tile of outputs run at once; else 1."""
    room = multiprocessors(weight_OI.device) // triton.cdiv(weight_OI.shape[0], OUTPUTS)
    return min(MAX_ADDED_PARTS, 1 << max(room, 1).bit_length() - 1)


def _each(inputs: int, parts: int) -> int:
    return triton.cdiv(inputs, parts * PART_INPUTS) * PART_INPUTS


def _in_parts(x_NI: torch.Tensor, weight_OI: torch.Tensor, each: int, *, gives_way: bool) -> torch.Tensor:
    """[N, P, O]: x W^T in float32."""
    (rows, inputs), outputs = x_NI.shape, weight_OI.shape[0]
    parts = triton.cdiv(inputs, each)
    y_NPO = x_NI.new_empty(rows, parts, outputs, dtype=torch.float32)
    if rows == 0:
        return y_NPO
    height = tile_height(rows)
    block = BLOCKS[height]
    x_NI = x_NI.contiguous()
    _parts_kernel[triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, height), parts](
        TensorDescriptor(x_NI, [rows, inputs], [inputs, 1], [height, block]),
        described(weight_OI, OUTPUTS, block),
        y_NPO,
        rows,
        inputs,
        each,
        outputs,
        OUTPUTS,
        height,
        block,
        gives_way,
        num_warps=4,
        num_stages=4,
        **dependent(x_NI.device),
    )
    return y_NPO
