"""Matrix products y = x W^T + b that always add in the same order: the products of a row's elements with a weight's,
first to last, sixteen at a time, as the tensor cores take them.

Every tile shape of this kernel gives a row the same bits, and so do the library's kernels that do not split the sum
(seen on an H200 with cuBLAS 13: 1 to 8,192 rows, five shapes of an 8B model; docs/decisions/0003-row-invariance.md).
So a row's bits do not depend on how many rows run beside it, and tiles may be chosen for speed alone. For few rows the
library splits the sum; this kernel does not, and is as fast or faster, because it reads the weights at the memory's
full bandwidth.

The weight's rows are the tall side of a tile and the rows of x the short one, so that a single row wastes nothing.

Legend: N rows, I input width, O output width; in kernels B outputs of a tile, R rows of a tile, K inputs of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stridelm.kernels.agreement import agree
from stridelm.kernels.dependent import dependent, nearly_done, once_written
from stridelm.kernels.processors import multiprocessors
from stridelm.kernels.triton_rows import gated

DTYPES = (torch.float16, torch.bfloat16)
FEW_ROWS = 64
"""Up to this many rows the kernel is at least as fast as the library."""
GATED_ROWS = (range(1, FEW_ROWS + 1), range(97, 129))
"""Numbers of rows at which the gated product is faster than the library's product followed by a launch for the
activation; with 65 to 96 rows it is as fast."""
GENERATIONS = (9, 10)
"""Compute capabilities whose processors share 227 KiB among a program's threads."""
VECTOR_BYTES = 16
"""The copy engine requires addresses and strides to be multiples of this."""


@dataclass(frozen=True, slots=True, order=True)
class Tile:
    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int


@triton.jit
def finished_tile(sum_BR, up_BR, bias, output_B, outputs, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """The tile with the bias, if there is one, and with the gate applied, if there is an ACTIVATION. Gate and up are
    first rounded to `dtype`, as if they had been stored."""
    if bias is not None:
        exists_B = output_B < outputs
        sum_BR += tl.load(bias + output_B, mask=exists_B, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION is not None:
            up_BR += tl.load(bias + outputs + output_B, mask=exists_B, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        sum_BR = gated(sum_BR.to(dtype).to(tl.float32), up_BR.to(dtype).to(tl.float32), ACTIVATION)
    return sum_BR


@triton.jit
def store_tile(y, sum_BR, up_BR, bias, output_B, outputs, row_R, exists_R, ACTIVATION: tl.constexpr):
    """Finish the tile and store it to rows `row_R` of y."""
    sum_BR = finished_tile(sum_BR, up_BR, bias, output_B, outputs, y.dtype.element_ty, ACTIVATION)
    at_BR = y + row_R.to(tl.int64)[None, :] * outputs + output_B[:, None]
    tl.store(at_BR, sum_BR.to(y.dtype.element_ty), mask=(output_B < outputs)[:, None] & exists_R[None, :])


@triton.jit
def write_product(
    x,
    weight,
    bias,
    up,
    y,
    first,
    first_row,
    rows,
    inputs,
    outputs,
    UP_STRIDE: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    STAGES: tl.constexpr = None,
):
    """A tile of y: outputs from `first` on, of rows from `first_row` on. The launch has not waited before. With an
    ACTIVATION y is the gated product: the weight holds gate above up, `outputs` rows each, unless `up` is given, whose
    rows lie UP_STRIDE apart. STAGES: if not the kernel's."""
    DOUBLE: tl.constexpr = ACTIVATION is not None and up is None
    sum_BR = tl.zeros([B, R], tl.float32)
    up_BR = sum_BR
    for k in tl.range(0, inputs, K, num_stages=STAGES):
        weight_BK = weight.load([first, k])
        if DOUBLE:
            up_weight_BK = weight.load([outputs + first, k])
        x_KR = x.load([first_row, once_written(k, DEPENDENT)]).T
        sum_BR = tl.dot(weight_BK, x_KR, sum_BR)
        if DOUBLE:
            up_BR = tl.dot(up_weight_BK, x_KR, up_BR)
    nearly_done(DEPENDENT)
    output_B = first + tl.arange(0, B)
    row_R = first_row + tl.arange(0, R)
    if up is not None:
        at_BR = up + row_R.to(tl.int64)[None, :] * UP_STRIDE + output_B[:, None]
        exists_BR = (output_B < outputs)[:, None] & (row_R < rows)[None, :]
        up_BR = tl.load(at_BR, mask=exists_BR, other=0.0).to(tl.float32)
    store_tile(y, sum_BR, up_BR, bias, output_B, outputs, row_R, row_R < rows, ACTIVATION)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    weight,
    bias,
    up,
    y,
    rows,
    inputs,
    outputs,
    UP_STRIDE: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of outputs, tiles of rows)."""
    first, first_row = tl.program_id(0) * B, tl.program_id(1) * R
    write_product(
        x, weight, bias, up, y, first, first_row, rows, inputs, outputs, UP_STRIDE, B, R, K, ACTIVATION, DEPENDENT
    )


def can_multiply(weight_OI: torch.Tensor) -> bool:
    """Whether the kernel supports this weight, on its device."""
    return weight_OI.dtype in DTYPES and can_tile(weight_OI)


def can_tile(weight_OI: torch.Tensor) -> bool:
    """Whether the copy engine supports this weight's alignment, and the device has enough shared memory for the
    tiles."""
    if weight_OI.is_cuda and torch.cuda.get_device_capability(weight_OI.device)[0] not in GENERATIONS:
        return False
    stride = weight_OI.stride(0) * weight_OI.element_size()
    aligned = weight_OI.data_ptr() % VECTOR_BYTES == 0 and stride % VECTOR_BYTES == 0
    return weight_OI.stride(1) == 1 and aligned


def described(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix that the copy engine supports, for kernels that load blocks of so many rows and columns."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def product(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    activation: str | None = None,
    up_NO: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + b: [N, O]. With an activation (of Ops.gate), O = 2 U and the result is the gated product, [N, U]; with
    `up`, whose rows may lie apart, the product is the gate alone, which has no bias.

    Needs `can_multiply(weight_OI)`; x of the weight's dtype.
    """
    is_double = activation is not None and up_NO is None
    (rows, inputs), outputs = x_NI.shape, weight_OI.shape[0] // (2 if is_double else 1)
    assert up_NO is None or (activation and bias_O is None and up_NO.shape == (rows, outputs) and up_NO.stride(1) == 1)
    y = x_NI.new_empty(rows, outputs)
    tile = choose_tile(rows, outputs, is_double, x_NI.device)
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows))
    x_NI = x_NI.contiguous()
    _product_kernel[grid](
        TensorDescriptor(x_NI, [rows, inputs], [inputs, 1], [tile.rows, tile.inputs]),
        described(weight_OI, tile.outputs, tile.inputs),
        bias_O,
        up_NO,
        y,
        rows,
        inputs,
        outputs,
        0 if up_NO is None else up_NO.stride(0),
        tile.outputs,
        tile.rows,
        tile.inputs,
        activation,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x_NI.device),
    )
    return y


def tile_height(rows: int) -> int:
    """The height of the lowest tiles of which one holds so many rows; if none does, of the highest."""
    return next((size for size in (16, 32, 64) if rows <= size), 128)


@cache
def choose_tile(rows: int, outputs: int, is_gated: bool, device: torch.device) -> Tile:
    """The fastest tile measured on an H200 or H100 (benchmarks/gpu_products.py). All give the same bits."""
    height = tile_height(rows)
    many = outputs >= 128 * multiprocessors(device)  # with fewer, tiles of 128 outputs would leave processors idle
    if height == 128 and is_gated:
        return Tile(64, height, 64, warps=4, stages=3)
    if height == 128:
        return Tile(128 if many else 64, height, 64, warps=8 if many else 4, stages=5)
    if is_gated:
        return Tile(64, height, 128, warps=4, stages=4)
    if many:  # with few rows and three stages, two programs fit on a processor
        return Tile(128, height, 128, warps=4, stages=3 if height < 64 else 4)
    if height < 64:
        return Tile(64, height, 256, warps=4, stages=4)
    return Tile(64, height, 128, warps=4, stages=6)


def library_agrees(x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> bool:
    """Whether the library's product of this shape gives this kernel's bits: tried once per shape, on random numbers."""

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.Generator(x_NI.device).manual_seed(0)
        x = torch.randn(x_NI.shape, generator=numbers, dtype=x_NI.dtype, device=x_NI.device)
        return product(x, weight_OI, bias_O), F.linear(x, weight_OI, bias_O)

    return agree((weight_OI.shape, weight_OI.dtype, bias_O is None, x_NI.shape[0], x_NI.device), both)
