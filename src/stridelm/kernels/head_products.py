"""Products of each head's rows with that head's matrix, in one launch. Every sum is added from its first term to its
last.

A row's bits do not depend on how many rows run beside it, for the reason given in products.py: the matrix is the tall
side of a tile and rows are the short one, so tiles of different heights run the same instructions on a row.

Legend: N rows, H heads, A inputs, O outputs of a head; in the kernel B outputs of a tile, R rows of a tile, K inputs of
a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, wait_for_inputs

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OUTPUTS = 64
"""Of a tile: a matrix instruction of a warp group is as high."""
FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile."""


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    weight,
    y,
    rows,
    x_stride_n,
    x_stride_h,
    weight_stride_h,
    weight_stride_a,
    weight_stride_o,
    A: tl.constexpr,
    O: tl.constexpr,  # noqa: E741 (the legend's)
    H: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of outputs, tiles of rows, H)."""
    wait_for_inputs(DEPENDENT)
    head = tl.program_id(2)
    output_B = tl.program_id(0) * B + tl.arange(0, B)
    row_R = (tl.program_id(1) * R + tl.arange(0, R)).to(tl.int64)
    own_B, live_R = output_B < O, row_R < rows
    x += head.to(tl.int64) * x_stride_h
    weight += head.to(tl.int64) * weight_stride_h
    sum_BR = tl.zeros([B, R], tl.float32)
    for first in range(0, A, K):
        input_K = first + tl.arange(0, K)
        exists_K = input_K < A
        weight_BK = tl.load(
            weight + output_B[:, None] * weight_stride_o + input_K[None, :] * weight_stride_a,
            mask=own_B[:, None] & exists_K[None, :],
            other=0.0,
        )
        x_KR = tl.load(
            x + row_R[None, :] * x_stride_n + input_K[:, None], mask=exists_K[:, None] & live_R[None, :], other=0.0
        )
        sum_BR = tl.dot(weight_BK, x_KR, sum_BR, input_precision=PRECISION)
    at_BR = y + (row_R[None, :] * H + head) * O + output_B[:, None]
    tl.store(at_BR, sum_BR.to(y.dtype.element_ty), mask=own_B[:, None] & live_R[None, :])


def head_products(x_NHA: torch.Tensor, weight_HAO: torch.Tensor) -> torch.Tensor:
    """[N, H, O]. One dtype of DTYPES; x's last dimension is contiguous, and one of the weight's last two."""
    (rows, heads, inputs), outputs = x_NHA.shape, weight_HAO.shape[2]
    assert x_NHA.stride(2) == 1 and x_NHA.dtype == weight_HAO.dtype and x_NHA.dtype in DTYPES
    assert weight_HAO.shape[:2] == (heads, inputs)
    y_NHO = x_NHA.new_empty(rows, heads, outputs)
    if rows == 0:
        return y_NHO
    wide = x_NHA.dtype == torch.float32  # multiplied without matrix instructions, whose order would depend on the tile
    height = FEW_ROWS if wide or rows <= FEW_ROWS else MANY_ROWS
    _product_kernel[triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, height), heads](
        x_NHA,
        weight_HAO,
        y_NHO,
        rows,
        *x_NHA.stride()[:2],
        *weight_HAO.stride(),
        inputs,
        outputs,
        heads,
        OUTPUTS,
        height,
        128 if inputs > 128 and not wide else 64,
        "ieee" if wide else "tf32",
        num_warps=4,
        num_stages=4,
        **dependent(x_NHA.device),
    )
    return y_NHO
