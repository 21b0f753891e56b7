"""The row operations on a GPU, in Triton.

A program works on one row (or on some columns or heads of one), in blocks whose sizes and warps follow from the widths
alone: neither the number of rows nor autotuning chooses among kernels. If all inputs start at multiples of 16 bytes,
there is one compiled form per width, with one order of adding. So a row's bits depend only on that row.

Nothing is read on the host, so launches can be captured into a CUDA graph and replayed over new values.

Legend: N rows, C hidden width, I MLP width, X = H + 2G heads side by side (H query, G key, G value heads; H + G if keys
are also values), D head size, P pool slots; in kernels B columns of a block, K heads processed at once.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, wait_for_inputs
from stridelm.kernels.ops import LatentRope, Parts, QKRope
from stridelm.kernels.part_logits import part_logits
from stridelm.kernels.plain_fp8 import LARGEST
from stridelm.kernels.quantise import destination, empty_rows, quantise, store_quantised
from stridelm.kernels.row_forms import QuantisedRows, RowForm, Rows
from stridelm.kernels.soft_cap import soft_cap
from stridelm.kernels.triton_norms import (
    add_normed,
    combine_norm,
    combine_norm_quantised,
    is_whole,
    norm,
    norm_quantised,
    rms_scale,
    starts_whole,
    warps,
    whole,
)
from stridelm.kernels.triton_router import combine, route

GATE_COLUMNS = 1024
"""Columns of a row that a program gates: several programs share even a single row."""
_LARGEST = tl.constexpr(LARGEST)
TURN_HEADS = 8
"""Heads of a row that a program rotates."""


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up in float32; ACTIVATION: as in ops.py."""
    if ACTIVATION == "gelu":
        return gate * 0.5 * (1.0 + tl.math.erf(gate * 0.7071067811865476)) * up
    slope = gate
    if ACTIVATION == "gelu_tanh":  # x (1 + tanh u) / 2 is x / (1 + e^-2u)
        slope = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    return gate / (1.0 + tl.exp(-slope)) * up


@triton.jit
def _gate_kernel(
    gate,
    up,
    out,
    scales,
    WIDTH: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, blocks of columns). WIDTH: I. Without `up`, rows of `gate` are twice as long and have it too. UP_STRIDE:
    from one row of `up` to the next. With scales, rows are quantised (quantise.py): K columns share one."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists_B = column_B < WIDTH
    if up is None:
        gate += row * (2 * WIDTH)
        up = gate + WIDTH
    else:
        gate += row * WIDTH
        up += row * UP_STRIDE
    gate_B = tl.load(gate + column_B, mask=exists_B, other=0.0).to(tl.float32)
    up_B = tl.load(up + column_B, mask=exists_B, other=0.0).to(tl.float32)
    made_B = gated(gate_B, up_B, ACTIVATION)
    if scales is None:
        tl.store(out + row * WIDTH + column_B, made_B, mask=exists_B)
    else:
        made_B = made_B.to(gate.dtype.element_ty)
        store_quantised(made_B, out, scales, row, tl.program_id(1) * BLOCK, WIDTH, BLOCK, K)


@triton.jit
def _as_stored(x, inverse, pool):
    """What is written to a pool for a number: itself, or in eight bits (entries.py). inverse: of the entries' scale."""
    if pool.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) * inverse, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        x = x.to(tl.float8e4nv)
    return x


# Positions and slots are read one by one and are often views into a larger buffer, at any offset.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _turn_kernel(
    qkv,
    positions,
    cos,
    sin,
    norms,
    eps,
    slots,
    queries,
    keys,
    values,
    key_inverse,
    value_inverse,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    NORMED_VALUES: tl.constexpr,
    KEYS_AS_VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, blocks of HEADS of the H + 2G heads). A head is held as D / 2 pairs, of which the first PAIRS are
    rotated; the others are pairs only so that all dimensions are held alike."""
    wait_for_inputs(DEPENDENT)
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    head_K = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair_B = tl.arange(0, BLOCK)
    turned_B = pair_B < PAIRS
    low_B = pair_B if PAIRS == HALF else tl.where(turned_B, pair_B, pair_B + PAIRS)
    high_B = low_B + HALF if PAIRS == HALF else low_B + tl.where(turned_B, PAIRS, HALF - PAIRS)
    exists_KB = (head_K < H + 2 * G)[:, None] & (pair_B < HALF)[None, :]
    from_K = tl.where(head_K < H + G, head_K, head_K - G) if KEYS_AS_VALUES else head_K
    X: tl.constexpr = H + G if KEYS_AS_VALUES else H + 2 * G
    at_KB = qkv + (row * X + from_K)[:, None] * D
    stored_low_KB = tl.load(at_KB + low_B[None, :], mask=exists_KB, other=0.0)
    stored_high_KB = tl.load(at_KB + high_B[None, :], mask=exists_KB, other=0.0)

    low_KB, high_KB = stored_low_KB.to(tl.float32), stored_high_KB.to(tl.float32)
    if norms is not None:
        weight_KB = norms + tl.where(head_K < H, 0, D)[:, None]
        weight_low_KB = tl.load(weight_KB + low_B[None, :], mask=exists_KB, other=0.0).to(tl.float32)
        weight_high_KB = tl.load(weight_KB + high_B[None, :], mask=exists_KB, other=0.0).to(tl.float32)
        scale_K1 = rms_scale(tl.sum(low_KB * low_KB + high_KB * high_KB, 1), D, eps)[:, None]
        if NORMED_VALUES:
            stored_low_KB, stored_high_KB = low_KB * scale_K1, high_KB * scale_K1
        low_KB = low_KB * scale_K1 * weight_low_KB
        high_KB = high_KB * scale_K1 * weight_high_KB
    # Loaded again for each head, straight into the threads that need it: sharing one load would cost a barrier.
    angle_KB = position * PAIRS + tl.broadcast_to(pair_B[None, :], [HEADS, BLOCK])
    cos_KB = tl.load(cos + angle_KB, mask=turned_B[None, :], other=0.0)
    sin_KB = tl.load(sin + angle_KB, mask=turned_B[None, :], other=0.0)
    roped_low_KB = low_KB * cos_KB - high_KB * sin_KB
    roped_high_KB = high_KB * cos_KB + low_KB * sin_KB
    if PAIRS < HALF:
        roped_low_KB = tl.where(turned_B[None, :], roped_low_KB, low_KB)
        roped_high_KB = tl.where(turned_B[None, :], roped_high_KB, high_KB)

    # A block may hold query, key and value heads, each of which is stored in a different tensor.
    at_KB = queries + (row * H + head_K)[:, None] * D
    mine_KB = exists_KB & (head_K < H)[:, None]
    tl.store(at_KB + low_B[None, :], roped_low_KB, mask=mine_KB)
    tl.store(at_KB + high_B[None, :], roped_high_KB, mask=mine_KB)
    at_KB = keys + (slot * G + head_K - H)[:, None] * D
    mine_KB = exists_KB & ((head_K >= H) & (head_K < H + G))[:, None]
    tl.store(at_KB + low_B[None, :], _as_stored(roped_low_KB, key_inverse, keys), mask=mine_KB)
    tl.store(at_KB + high_B[None, :], _as_stored(roped_high_KB, key_inverse, keys), mask=mine_KB)
    at_KB = values + (slot * G + head_K - H - G)[:, None] * D
    mine_KB = exists_KB & (head_K >= H + G)[:, None]
    tl.store(at_KB + low_B[None, :], _as_stored(stored_low_KB, value_inverse, values), mask=mine_KB)
    tl.store(at_KB + high_B[None, :], _as_stored(stored_high_KB, value_inverse, values), mask=mine_KB)


@triton.jit
def _turned(at, cos_B, sin_B, exists, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both halves of rotated vectors. at: pointers to the first number of each pair."""
    STEP: tl.constexpr = 1 if INTERLEAVED else HALF
    low = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    high = tl.load(at + STEP, mask=exists, other=0.0).to(tl.float32)
    return low * cos_B - high * sin_B, high * cos_B + low * sin_B


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _latent_kernel(
    queries,
    rows,
    positions,
    cos,
    sin,
    weight,
    eps,
    slots,
    out,
    latents,
    inverse,
    query_stride_n,
    query_stride_h,
    row_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, 1 + blocks of HEADS of the H heads); a row's first program makes its latent row. BLOCK: of pairs."""
    wait_for_inputs(DEPENDENT)
    HALF: tl.constexpr = K // 2
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    pair_B = tl.arange(0, BLOCK)
    real_B = pair_B < HALF
    cos_B = tl.load(cos + position * HALF + pair_B, mask=real_B, other=0.0)
    sin_B = tl.load(sin + position * HALF + pair_B, mask=real_B, other=0.0)
    first_B = pair_B * 2 if INTERLEAVED else pair_B
    if tl.program_id(1) == 0:
        entry = latents + tl.load(slots + row).to(tl.int64) * (R + K)
        dim_R = tl.arange(0, BLOCK_R)
        exists_R = dim_R < R
        x_R = tl.load(rows + row * row_stride + dim_R, mask=exists_R, other=0.0).to(tl.float32)
        weight_R = tl.load(weight + dim_R, mask=exists_R, other=0.0).to(tl.float32)
        normed_R = x_R * rms_scale(tl.sum(x_R * x_R, 0), R, eps) * weight_R
        tl.store(entry + dim_R, _as_stored(normed_R, inverse, latents), mask=exists_R)
        low_B, high_B = _turned(rows + row * row_stride + R + first_B, cos_B, sin_B, real_B, HALF, INTERLEAVED)
        tl.store(entry + R + pair_B, _as_stored(low_B, inverse, latents), mask=real_B)
        tl.store(entry + R + HALF + pair_B, _as_stored(high_B, inverse, latents), mask=real_B)
    else:
        head_K = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        exists_KB = (head_K < H)[:, None] & real_B[None, :]
        at_KB = queries + row * query_stride_n + head_K[:, None] * query_stride_h + first_B[None, :]
        low_KB, high_KB = _turned(at_KB, cos_B[None, :], sin_B[None, :], exists_KB, HALF, INTERLEAVED)
        at_KB = out + (row * H + head_K)[:, None] * K + pair_B[None, :]
        tl.store(at_KB, low_KB, mask=exists_KB)
        tl.store(at_KB + HALF, high_KB, mask=exists_KB)


class TritonOps:
    device: ClassVar[str | None] = "cuda"
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset((torch.float16, torch.bfloat16, torch.float32))
    route = staticmethod(route)
    combine = staticmethod(combine)
    combine_norm = staticmethod(combine_norm)
    part_logits = staticmethod(part_logits)
    soft_cap = staticmethod(soft_cap)

    def prepare(
        self, dtype: torch.dtype, *, normed_heads: bool = False, activation: str = "silu", has_experts: bool = False
    ) -> None:
        """Does nothing: each width is a separate kernel, which the first launch compiles and Triton caches on disk."""

    def norm(self, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
        return norm(x_NC, None, weight_C, eps)

    def add_norm(
        self, x_NC: torch.Tensor, delta_NC: torch.Tensor, weight_C: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_NC = whole(x_NC)
        return x_NC, norm(x_NC, whole(delta_NC), weight_C, eps)

    def add_normed(
        self,
        x_NC: torch.Tensor,
        delta_NC: torch.Tensor,
        after_C: torch.Tensor,
        eps: float,
        factor_1: torch.Tensor | None = None,
        weight_C: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return add_normed(x_NC, delta_NC, after_C, eps, factor_1, weight_C)

    def gate(
        self, gate_up_N2I: torch.Tensor, activation: str = "silu", up_NI: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, width = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // (2 if up_NI is None else 1)
        out_NI = gate_up_N2I.new_empty(rows, width)
        if up_NI is not None and not starts_whole(up_NI):
            up_NI = whole(up_NI)
        _gate(gate_up_N2I, activation, up_NI, out_NI)
        return out_NI

    def norm_quantised(
        self,
        x_NC: torch.Tensor,
        weight_C: torch.Tensor,
        eps: float,
        form: RowForm,
        delta: torch.Tensor | Parts | None = None,
    ) -> tuple[torch.Tensor, QuantisedRows]:
        if isinstance(delta, Parts):
            return combine_norm_quantised(delta, x_NC, weight_C, eps, form)
        if delta is None:
            return x_NC, norm_quantised(x_NC, None, weight_C, eps, form)
        total_NC, x_NC = whole(delta), whole(x_NC)  # the sum is written over delta, and x may be the caller's
        return total_NC, norm_quantised(total_NC, x_NC, weight_C, eps, form)

    def gate_quantised(self, gate_up_N2I: torch.Tensor, activation: str, form: RowForm) -> QuantisedRows:
        if form is RowForm.WHOLE:  # no program has a whole row
            return quantise(self.gate(gate_up_N2I, activation), form)
        rows, width = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
        out = empty_rows((rows, width), form, gate_up_N2I.dtype, gate_up_N2I.device)
        _gate(gate_up_N2I, activation, None, out)
        return out

    def rope_and_store(
        self,
        qkv_NXD: torch.Tensor,
        rope: QKRope,
        keys_PGD: torch.Tensor,
        values_PGD: torch.Tensor,
        slots_N: torch.Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> torch.Tensor:
        rows, projected, size = qkv_NXD.shape
        pairs = rope.cos_LF.shape[1]
        assert projected == rope.projected and size % 2 == 0 and pairs <= size // 2
        assert rope.norms is not None or not rope.normed_values
        assert is_whole(keys_PGD) and is_whole(values_PGD)
        q_NHD = qkv_NXD.new_empty(rows, rope.heads, size)
        block = triton.next_power_of_2(size // 2)
        _turn_kernel[rows, triton.cdiv(rope.heads + 2 * rope.kv_heads, TURN_HEADS)](
            whole(qkv_NXD),
            rope.positions.contiguous(),
            whole(rope.cos_LF),
            whole(rope.sin_LF),
            None if rope.norms is None else whole(rope.norms),
            rope.eps,
            slots_N.contiguous(),
            q_NHD,
            keys_PGD,
            values_PGD,
            1 / key_scale,
            1 / value_scale,
            rope.heads,
            rope.kv_heads,
            size,
            pairs,
            rope.normed_values,
            rope.keys_as_values,
            TURN_HEADS,
            block,
            num_warps=warps(TURN_HEADS * block),
            **dependent(qkv_NXD.device),
        )
        return q_NHD

    def rope_and_store_latent(
        self,
        q_NHK: torch.Tensor,
        rows_NC: torch.Tensor,
        rope: LatentRope,
        latents_PC: torch.Tensor,
        slots_N: torch.Tensor,
        scale: float = 1.0,
    ) -> torch.Tensor:
        rows, heads, width = q_NHK.shape
        rank = rows_NC.shape[1] - width
        assert width % 2 == 0 and q_NHK.stride(2) == rows_NC.stride(1) == 1 and is_whole(latents_PC)
        out_NHK = q_NHK.new_empty(rows, heads, width)
        block, block_r = triton.next_power_of_2(width // 2), triton.next_power_of_2(rank)
        _latent_kernel[rows, 1 + triton.cdiv(heads, TURN_HEADS)](
            q_NHK,
            rows_NC,
            rope.positions.contiguous(),
            whole(rope.cos_LF),
            whole(rope.sin_LF),
            whole(rope.norm_R),
            rope.eps,
            slots_N.contiguous(),
            out_NHK,
            latents_PC,
            1 / scale,
            *q_NHK.stride()[:2],
            rows_NC.stride(0),
            heads,
            rank,
            width,
            rope.interleaved,
            TURN_HEADS,
            block_r,
            block,
            num_warps=warps(max(TURN_HEADS * block, block_r)),
            **dependent(q_NHK.device),
        )
        return out_NHK


def _gate(gate_up: torch.Tensor, activation: str, up_NI: torch.Tensor | None, out: Rows) -> None:
    rows, width = out.shape
    block = min(GATE_COLUMNS, triton.next_power_of_2(width))
    out_NI, scales_SN, each = destination(out, block)
    _gate_kernel[rows, triton.cdiv(width, block)](
        whole(gate_up),
        up_NI,
        out_NI,
        scales_SN,
        width,
        0 if up_NI is None else up_NI.stride(0),
        block,
        each,
        activation,
        num_warps=warps(block),
        **dependent(gate_up.device),
    )
