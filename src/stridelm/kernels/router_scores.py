"""A router's product on a GPU, whose results are not rounded to 16 bits.

It has so few outputs that two programs would read all weights for a row, one block of inputs after another. So a sum
has parts, taken by different programs, which are added up first to last where the row chooses (triton_router.py). They
follow from the width alone, and so do a row's bits.

Legend: N rows, I inputs, L logits, P parts of a sum; in the kernel B logits of a tile, R rows of a tile, K inputs of a
block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stridelm.kernels.dependent import dependent, give_way, wait_for_inputs
from stridelm.kernels.products import described, tile_height

PART_INPUTS = 256
"""The fewest inputs of a part, whose number is a multiple of this; this is a multiple of every block's."""
MAX_PARTS = 8
LOGITS = 64
"""Of a tile."""
BLOCKS = {16: 256, 32: 256, 64: 128, 128: 64}
"""Inputs of a block, by rows of a tile."""


@triton.jit(do_not_specialize=["rows"])
def _scores_kernel(
    x,
    weight,
    logits,
    rows,
    inputs,
    each,
    L: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of logits, tiles of rows, P). each: inputs of a part."""
    give_way(rows, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    first, first_row = tl.program_id(0) * B, tl.program_id(1) * R
    part, parts = tl.program_id(2), tl.num_programs(2)
    sum_BR = tl.zeros([B, R], tl.float32)
    for k in range(part * each, tl.minimum((part + 1) * each, inputs), K):
        sum_BR = tl.dot(weight.load([first, k]), x.load([first_row, k]).T, sum_BR)
    logit_B = first + tl.arange(0, B)
    row_R = first_row + tl.arange(0, R)
    at_BR = logits + (row_R.to(tl.int64)[None, :] * parts + part) * L + logit_B[:, None]
    tl.store(at_BR, sum_BR, mask=(logit_B < L)[:, None] & (row_R < rows)[None, :])


def scores(x_NI: torch.Tensor, weight_LI: torch.Tensor, bias: None) -> torch.Tensor:
    """[N, P, L]: x W^T in float32, as `Ops.route` takes it. Needs `can_multiply(weight)`, and x of its dtype."""
    (rows, inputs), logits = x_NI.shape, weight_LI.shape[0]
    each = triton.cdiv(inputs, MAX_PARTS * PART_INPUTS) * PART_INPUTS
    parts = triton.cdiv(inputs, each)
    logits_NPL = x_NI.new_empty(rows, parts, logits, dtype=torch.float32)
    if rows == 0:
        return logits_NPL
    height = tile_height(rows)
    block = BLOCKS[height]
    x_NI = x_NI.contiguous()
    _scores_kernel[triton.cdiv(logits, LOGITS), triton.cdiv(rows, height), parts](
        TensorDescriptor(x_NI, [rows, inputs], [inputs, 1], [height, block]),
        described(weight_LI, LOGITS, block),
        logits_NPL,
        rows,
        inputs,
        each,
        logits,
        LOGITS,
        height,
        block,
        num_warps=4,
        num_stages=4,
        **dependent(x_NI.device),
    )
    return logits_NPL
