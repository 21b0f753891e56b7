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

from stridelm.kernels.dependent import dependent, give_way, wait_for_inputs
from stridelm.kernels.head_rows import join_norms, spread_logits
from stridelm.kernels.latent_rows import as_stored, rope_and_store_latent
from stridelm.kernels.ops import Parts, QKRope
from stridelm.kernels.part_logits import part_logits
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
    POWERS: tl.constexpr,
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
        store_quantised(made_B, out, scales, row, tl.program_id(1) * BLOCK, WIDTH, BLOCK, K, POWERS)


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
    give_way(tl.num_programs(0), DEPENDENT)
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
    tl.store(at_KB + low_B[None, :], as_stored(roped_low_KB, key_inverse, keys), mask=mine_KB)
    tl.store(at_KB + high_B[None, :], as_stored(roped_high_KB, key_inverse, keys), mask=mine_KB)
    at_KB = values + (slot * G + head_K - H - G)[:, None] * D
    mine_KB = exists_KB & (head_K >= H + G)[:, None]
    tl.store(at_KB + low_B[None, :], as_stored(stored_low_KB, value_inverse, values), mask=mine_KB)
    tl.store(at_KB + high_B[None, :], as_stored(stored_high_KB, value_inverse, values), mask=mine_KB)


class TritonOps:
    device: ClassVar[str | None] = "cuda"
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset((torch.float16, torch.bfloat16, torch.float32))
    route = staticmethod(route)
    combine = staticmethod(combine)
    combine_norm = staticmethod(combine_norm)
    part_logits = staticmethod(part_logits)
    rope_and_store_latent = staticmethod(rope_and_store_latent)
    soft_cap = staticmethod(soft_cap)
    join_norms = staticmethod(join_norms)
    spread_logits = staticmethod(spread_logits)

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
        *,
        keeps_dense: bool = False,
    ) -> tuple[torch.Tensor, QuantisedRows]:
        if isinstance(delta, Parts):
            return combine_norm_quantised(delta, x_NC, weight_C, eps, form, keeps_dense)
        if delta is None:
            return x_NC, norm_quantised(x_NC, None, weight_C, eps, form, keeps_dense)
        total_NC, x_NC = whole(delta), whole(x_NC)  # the sum is written over delta, and x may be the caller's
        return total_NC, norm_quantised(total_NC, x_NC, weight_C, eps, form, keeps_dense)

    def gate_quantised(self, gate_up_N2I: torch.Tensor, activation: str, form: RowForm) -> QuantisedRows:
        if not form.by_block:  # no program has a whole row
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


def _gate(gate_up: torch.Tensor, activation: str, up_NI: torch.Tensor | None, out: Rows) -> None:
    rows, width = out.shape
    block = min(GATE_COLUMNS, triton.next_power_of_2(width))
    to = destination(out, block)
    _gate_kernel[rows, triton.cdiv(width, block)](
        whole(gate_up),
        up_NI,
        to.rows,
        to.scales,
        width,
        0 if up_NI is None else up_NI.stride(0),
        block,
        to.each,
        to.powers,
        activation,
        num_warps=warps(block),
        **dependent(gate_up.device),
    )
