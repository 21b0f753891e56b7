"""Norms of rows on a GPU, with what is added to the rows just before.

A program works on one row, in a block whose size and warps follow from the width alone (triton_rows.py says what that
is good for).

Legend: N rows, C width; in kernels B columns of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, give_way, wait_for_inputs
from stridelm.kernels.ops import Parts
from stridelm.kernels.quantise import destination, empty_rows, store_quantised
from stridelm.kernels.row_forms import QuantisedRows, RowForm, Rows
from stridelm.kernels.triton_router import weighted_sum

VECTOR_BYTES = 16
"""What a thread loads at once, if the address is a multiple of it."""


@triton.jit
def rms_scale(sum_of_squares, width: tl.constexpr, eps):
    """The factor that gives a vector of `width` numbers a root mean square of 1."""
    return tl.rsqrt(sum_of_squares / width + eps)


@triton.jit
def _store_normed(
    normed_B,
    dtype: tl.constexpr,
    out,
    scales,
    dense,
    row,
    column_B,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    POWERS: tl.constexpr,
):
    """Round and store a row; with scales, quantise it (quantise.py): K of its columns share one. dense: if given, where
    it is stored as it is too."""
    normed_B = normed_B.to(dtype)
    if scales is None:
        tl.store(out + row * C + column_B, normed_B, mask=column_B < C)
    else:
        store_quantised(normed_B, out, scales, row, 0, C, BLOCK, K, POWERS)
    if dense is not None:
        tl.store(dense + row * C + column_B, normed_B, mask=column_B < C)


@triton.jit
def _norm_kernel(
    x,
    delta,
    weight,
    out,
    scales,
    dense,
    eps,
    C: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    POWERS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N,). A delta, if given, is first added to x in place, and the sum is rounded as it is stored. STRIDE: from
    one row of x to the next. scales, dense, K: as in _store_normed."""
    give_way(tl.num_programs(0), DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.arange(0, BLOCK)
    exists_B = column_B < C
    at_B = row * C + column_B
    x += row * STRIDE
    x_B = tl.load(x + column_B, mask=exists_B, other=0.0)
    weight_B = tl.load(weight + column_B, mask=exists_B, other=0.0)  # loaded early, to overlap with the sum below
    if delta is not None:
        delta_B = tl.load(delta + at_B, mask=exists_B, other=0.0)
        x_B = (x_B.to(tl.float32) + delta_B.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + column_B, x_B, mask=exists_B)
    x_B = x_B.to(tl.float32)
    scale = rms_scale(tl.sum(x_B * x_B, 0), C, eps)
    normed_B = x_B * scale * weight_B.to(tl.float32)
    _store_normed(normed_B, x.dtype.element_ty, out, scales, dense, row, column_B, C, BLOCK, K, POWERS)


@triton.jit
def _combine_norm_kernel(
    parts,
    weights,
    shared,
    x,
    weight,
    total,
    out,
    scales,
    dense,
    eps,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    POWERS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N,). What is added to x is first rounded, as if it had been stored, and the total as it is stored. scales,
    dense, K: as in _store_normed."""
    give_way(tl.num_programs(0), DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.arange(0, BLOCK)
    exists_B = column_B < C
    at_B = row * C + column_B
    x_B = tl.load(x + at_B, mask=exists_B, other=0.0)
    weight_B = tl.load(weight + column_B, mask=exists_B, other=0.0)
    delta_B = weighted_sum(parts, weights, shared, row, column_B, exists_B, C, PARTS, W, BLOCK).to(x.dtype.element_ty)
    x_B = (x_B.to(tl.float32) + delta_B.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(total + at_B, x_B, mask=exists_B)
    x_B = x_B.to(tl.float32)
    scale = rms_scale(tl.sum(x_B * x_B, 0), C, eps)
    normed_B = x_B * scale * weight_B.to(tl.float32)
    _store_normed(normed_B, x.dtype.element_ty, out, scales, dense, row, column_B, C, BLOCK, K, POWERS)


@triton.jit
def _add_normed_kernel(
    x, delta, after, factor, weight, out, eps, C: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid (N,). The sum is written over delta, rounded as it is stored; its norm, with a weight, to `out`."""
    give_way(tl.num_programs(0), DEPENDENT)
    wait_for_inputs(DEPENDENT)
    column_B = tl.arange(0, BLOCK)
    exists_B = column_B < C
    at_B = tl.program_id(0).to(tl.int64) * C + column_B
    delta_B = tl.load(delta + at_B, mask=exists_B, other=0.0).to(tl.float32)
    x_B = tl.load(x + at_B, mask=exists_B, other=0.0).to(tl.float32)
    after_B = tl.load(after + column_B, mask=exists_B, other=0.0).to(tl.float32)
    if weight is not None:
        weight_B = tl.load(weight + column_B, mask=exists_B, other=0.0).to(tl.float32)
    total_B = x_B + delta_B * rms_scale(tl.sum(delta_B * delta_B, 0), C, eps) * after_B
    if factor is not None:
        total_B *= tl.load(factor).to(tl.float32)
    stored_B = total_B.to(delta.dtype.element_ty)
    tl.store(delta + at_B, stored_B, mask=exists_B)
    if weight is not None:
        total_B = stored_B.to(tl.float32)
        scale = rms_scale(tl.sum(total_B * total_B, 0), C, eps)
        tl.store(out + at_B, total_B * scale * weight_B, mask=exists_B)


def norm(x_NC: torch.Tensor, delta_NC: torch.Tensor | None, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    out_NC = x_NC.new_empty(x_NC.shape)
    _norm(x_NC, delta_NC, weight_C, eps, out_NC)
    return out_NC


def norm_quantised(
    x_NC: torch.Tensor,
    delta_NC: torch.Tensor | None,
    weight_C: torch.Tensor,
    eps: float,
    form: RowForm,
    keeps_dense: bool,
) -> QuantisedRows:
    """What `norm` returns, quantised."""
    out = empty_rows(x_NC.shape, form, x_NC.dtype, x_NC.device, keeps_dense=keeps_dense)
    _norm(x_NC, delta_NC, weight_C, eps, out)
    return out


def _norm(x_NC: torch.Tensor, delta_NC: torch.Tensor | None, weight_C: torch.Tensor, eps: float, out: Rows) -> None:
    rows, width = x_NC.shape
    apart = starts_whole(x_NC)
    x_NC = x_NC if apart else whole(x_NC)
    block = triton.next_power_of_2(width)
    to = destination(out, block)
    _norm_kernel[(rows,)](
        x_NC,
        delta_NC,
        whole(weight_C),
        to.rows,
        to.scales,
        out.dense_NI if isinstance(out, QuantisedRows) else None,
        eps,
        width,
        x_NC.stride(0) if apart else width,
        block,
        to.each,
        to.powers,
        num_warps=warps(block),
        **dependent(x_NC.device),
    )


def add_normed(
    x_NC: torch.Tensor,
    delta_NC: torch.Tensor,
    after_C: torch.Tensor,
    eps: float,
    factor_1: torch.Tensor | None,
    weight_C: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`Ops.add_normed`."""
    rows, width = x_NC.shape
    total_NC, block = whole(delta_NC), triton.next_power_of_2(width)
    out_NC = None if weight_C is None else torch.empty_like(total_NC)
    _add_normed_kernel[(rows,)](
        whole(x_NC),
        total_NC,
        whole(after_C),
        None if factor_1 is None else whole(factor_1),
        None if weight_C is None else whole(weight_C),
        out_NC,
        eps,
        width,
        block,
        num_warps=warps(block),
        **dependent(x_NC.device),
    )
    return total_NC, out_NC


def combine_norm(
    of: Parts, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.combine_norm`."""
    out_NC = x_NC.new_empty(x_NC.shape)
    return _combine_norm(of, x_NC, weight_C, eps, out_NC), out_NC


def combine_norm_quantised(
    of: Parts, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float, form: RowForm, keeps_dense: bool
) -> tuple[torch.Tensor, QuantisedRows]:
    """The same, with the norm quantised."""
    out = empty_rows(x_NC.shape, form, x_NC.dtype, x_NC.device, keeps_dense=keeps_dense)
    return _combine_norm(of, x_NC, weight_C, eps, out), out


def _combine_norm(of: Parts, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float, out: Rows) -> torch.Tensor:
    rows, width = x_NC.shape
    total_NC = x_NC.new_empty(rows, width)
    block = triton.next_power_of_2(width)
    to = destination(out, block)
    _combine_norm_kernel[(rows,)](
        whole(of.parts_NKC),
        of.weights_NW.contiguous(),
        None if of.shared_NC is None else whole(of.shared_NC),
        whole(x_NC),
        whole(weight_C),
        total_NC,
        to.rows,
        to.scales,
        out.dense_NI if isinstance(out, QuantisedRows) else None,
        eps,
        width,
        of.parts_NKC.shape[1],
        of.weights_NW.shape[1],
        block,
        to.each,
        to.powers,
        num_warps=warps(block),
        **dependent(x_NC.device),
    )
    return total_NC


def warps(numbers: int) -> int:
    """As many warps as give each thread one vector of eight 16-bit numbers; above 4,096 numbers a thread has more."""
    return min(16, max(1, numbers // 256))


def starts_whole(x_NC: torch.Tensor) -> bool:
    """Whether all rows, which may lie apart, start at multiples of VECTOR_BYTES: which form is launched then depends on
    no row."""
    starts = x_NC.data_ptr(), x_NC.stride(0) * x_NC.element_size()
    return x_NC.stride(1) == 1 and not any(start % VECTOR_BYTES for start in starts)


def is_whole(x: torch.Tensor) -> bool:
    """Contiguous, from a multiple of VECTOR_BYTES on."""
    return x.is_contiguous() and x.data_ptr() % VECTOR_BYTES == 0


def whole(x: torch.Tensor) -> torch.Tensor:
    """x if it is contiguous and starts at a multiple of 16 bytes, else a copy that does. For other addresses Triton
    compiles another form, with other vector widths and so another order of adding."""
    return x if is_whole(x) else x.clone(memory_format=torch.contiguous_format)
