"""Products of each head's rows with that head's matrix, in one launch. Every sum is added from its first term to its
last.

A row's bits do not depend on how many rows run beside it, for the reason given in products.py: the matrix is the tall
side of a tile and rows are the short one, so tiles of different heights run the same instructions on a row.

Legend: N rows, H heads, A inputs, O outputs of a head; in the kernel B outputs of a tile, R rows of a tile, K inputs of
a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, wait_for_inputs

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OUTPUTS = 64
"""Of a tile: a matrix instruction of a warp group is as high."""
FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile."""
WARPS, STAGES = 4, 4
"""Of a program."""


@triton.jit
def write_head_product(
    output_tile,
    row_tile,
    head,
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
    """A tile of a head's rows, for programs that have not waited for their inputs: a weight of one block is loaded
    before."""
    output_B = output_tile * B + tl.arange(0, B)
    row_R = (row_tile * R + tl.arange(0, R)).to(tl.int64)
    input_K = tl.arange(0, K)
    own_B, live_R = output_B < O, row_R < rows
    at_BK = weight + head.to(tl.int64) * weight_stride_h + output_B[:, None] * weight_stride_o
    at_BK += input_K[None, :] * weight_stride_a
    at_KR = x + head.to(tl.int64) * x_stride_h + row_R[None, :] * x_stride_n + input_K[:, None]
    sum_BR = tl.zeros([B, R], tl.float32)
    if A <= K:
        weight_BK = tl.load(at_BK, mask=own_B[:, None] & (input_K < A)[None, :], other=0.0)
        wait_for_inputs(DEPENDENT)
        x_KR = tl.load(at_KR, mask=(input_K < A)[:, None] & live_R[None, :], other=0.0)
        sum_BR = tl.dot(weight_BK, x_KR, sum_BR, input_precision=PRECISION)
    else:
        wait_for_inputs(DEPENDENT)
        for first in range(0, A, K):
            exists_K = first + input_K < A
            weight_BK = tl.load(at_BK + first * weight_stride_a, mask=own_B[:, None] & exists_K[None, :], other=0.0)
            x_KR = tl.load(at_KR + first, mask=exists_K[:, None] & live_R[None, :], other=0.0)
            sum_BR = tl.dot(weight_BK, x_KR, sum_BR, input_precision=PRECISION)
    at_BR = y + (row_R[None, :] * H + head) * O + output_B[:, None]
    tl.store(at_BR, sum_BR.to(y.dtype.element_ty), mask=own_B[:, None] & live_R[None, :])


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
    write_head_product(
        tl.program_id(0), tl.program_id(1), tl.program_id(2),
        x, weight, y, rows, x_stride_n, x_stride_h, weight_stride_h, weight_stride_a, weight_stride_o,
        A, O, H, B, R, K, PRECISION, DEPENDENT,
    )  # fmt: skip


def head_products(x_NHA: torch.Tensor, weight_HAO: torch.Tensor) -> torch.Tensor:
    """[N, H, O]. One dtype of DTYPES; x's last dimension is contiguous, and one of the weight's last two."""
    y_NHO = x_NHA.new_empty(*x_NHA.shape[:2], weight_HAO.shape[2])
    if y_NHO.numel():
        given = arguments(x_NHA, weight_HAO, y_NHO)
        _product_kernel[tiles_of(y_NHO)](*given, num_warps=WARPS, num_stages=STAGES, **dependent(x_NHA.device))
    return y_NHO


def tiles_of(y_NHO: torch.Tensor) -> tuple[int, int, int]:
    """(tiles of outputs, tiles of rows, H)."""
    rows, heads, outputs = y_NHO.shape
    return triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, _height(y_NHO)), heads


def arguments(x_NHA: torch.Tensor, weight_HAO: torch.Tensor, y_NHO: torch.Tensor) -> tuple[Any, ...]:
    """What `write_head_product` takes after tiles and head, but for DEPENDENT."""
    (rows, heads, inputs), outputs = x_NHA.shape, weight_HAO.shape[2]
    assert x_NHA.stride(2) == 1 and x_NHA.dtype == weight_HAO.dtype and x_NHA.dtype in DTYPES
    assert weight_HAO.shape[:2] == (heads, inputs)
    wide = _is_wide(x_NHA)
    return (
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
        _height(y_NHO),
        128 if inputs > 64 and not wide else 64,
        "ieee" if wide else "tf32",
    )


def _height(y_NHO: torch.Tensor) -> int:
    return FEW_ROWS if _is_wide(y_NHO) or len(y_NHO) <= FEW_ROWS else MANY_ROWS


def _is_wide(x: torch.Tensor) -> bool:
    """Multiplied without matrix instructions, whose order would depend on the tile."""
    return x.dtype == torch.float32
