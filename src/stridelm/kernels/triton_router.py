"""A mixture's router on a GPU: the choice of experts, and the weighted sum of what they make of a row, one launch each.

A row's bits depend on that row alone: a program works on one row, in an order that its widths define.

Legend: as in kernels/ops.py; L logits, P parts of a sum; in kernels G groups of M experts, E all experts and padding, B
columns of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, give_way, wait_for_inputs
from stridelm.kernels.logit_rows import order_key
from stridelm.kernels.ops import Routing

LAST_KEY, LAST_INT = tl.constexpr(2**32 - 1), tl.constexpr(2**31 - 1)
COMBINE_COLUMNS = 1024
"""Columns of a row that a program adds up."""


@triton.jit
def _logits(logits, row, at, exists, L: tl.constexpr, PARTS: tl.constexpr):
    """Some of a row's logits, their parts added first to last; -inf where none exists."""
    logit = tl.load(logits + row * PARTS * L + at, mask=exists, other=float("-inf"))
    for part in tl.static_range(1, PARTS):
        logit += tl.load(logits + (row * PARTS + part) * L + at, mask=exists, other=0.0)
    return logit


@triton.jit
def _route_kernel(
    logits,
    bias,
    own_scale,
    chosen,
    weights,
    logit_scale,
    scale,
    L: tl.constexpr,
    PARTS: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N,). Experts are held by group; without groups there is one."""
    give_way(tl.num_programs(0), DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    M: tl.constexpr = E // G
    group_G = tl.arange(0, BLOCK_G)
    member_M = tl.arange(0, BLOCK_M)
    expert_GM = group_G[:, None] * M + member_M[None, :]
    exists_GM = (group_G < G)[:, None] & (member_M < M)[None, :]
    logit_GM = _logits(logits, row, expert_GM, exists_GM, L, PARTS) * logit_scale
    if SIGMOID:
        score_GM = tl.where(exists_GM, 1.0 / (1.0 + tl.exp(-logit_GM)), 0.0)
    else:
        most = tl.max(tl.max(logit_GM, 1), 0)
        score_GM = tl.where(exists_GM, tl.exp(logit_GM - most), 0.0)
        score_GM = score_GM / tl.sum(tl.sum(score_GM, 1), 0)
    choice_GM = score_GM
    if bias is not None:
        choice_GM += tl.load(bias + expert_GM, mask=exists_GM, other=0.0)
    # NaN is taken first, so that a weight that was never loaded shows up.
    choice_GM = tl.where(choice_GM == choice_GM, choice_GM, float("inf"))
    choice_GM = tl.where(exists_GM, choice_GM, float("-inf"))
    if G > 1:
        first_G = tl.max(choice_GM, 1)
        at_G = tl.min(tl.where(choice_GM == first_G[:, None], member_M[None, :], BLOCK_M), 1)
        best_G = first_G + tl.max(tl.where(member_M[None, :] == at_G[:, None], float("-inf"), choice_GM), 1)
        better_GG = best_G[None, :] > best_G[:, None]
        better_GG |= (best_G[None, :] == best_G[:, None]) & (group_G[None, :] < group_G[:, None])
        choice_GM = tl.where((tl.sum(better_GG.to(tl.int32), 1) < KEPT)[:, None], choice_GM, float("-inf"))
    # The smallest key is that of the largest choice, and of equal ones the first expert is taken. Keys have 32 bits,
    # since a warp reduces these by one instruction. So do scores as integers, which are not negative: LAST_INT is above
    # all of them, or the NaN that is one.
    expert_E = tl.reshape(tl.where(exists_GM, expert_GM, LAST_INT), [BLOCK_G * BLOCK_M])
    key_E = tl.reshape(tl.where(exists_GM, order_key(choice_GM), LAST_KEY), [BLOCK_G * BLOCK_M])
    score_E = tl.reshape(score_GM, [BLOCK_G * BLOCK_M]).to(tl.int32, bitcast=True)
    k_K = tl.arange(0, BLOCK_K)
    expert_K = tl.full([BLOCK_K], -1, tl.int32)
    weight_K = tl.zeros([BLOCK_K], tl.int32)
    for k in range(K):
        expert = tl.min(tl.where(key_E == tl.min(key_E, 0), expert_E, LAST_INT), 0)
        taken_E = expert_E == expert
        key_E = tl.where(taken_E, LAST_KEY, key_E)
        expert_K = tl.where(k_K == k, expert, expert_K)
        weight_K = tl.where(k_K == k, tl.min(tl.where(taken_E, score_E, LAST_INT), 0), weight_K)
    tl.store(chosen + row * K + k_K, expert_K.to(tl.int64), mask=k_K < K)
    weight_K = weight_K.to(tl.float32, bitcast=True)
    if own_scale is not None:
        own_K = tl.load(own_scale + expert_K, mask=k_K < K, other=0.0).to(tl.float32)
    if RENORMALISES:
        weight_K = weight_K / (tl.sum(weight_K, 0) + 1e-20)
    weight_K = weight_K * scale
    if own_scale is not None:
        weight_K = weight_K * own_K
    if L > E:
        shared = _logits(logits, row, E, True, L, PARTS)
        weight_K = tl.where(k_K == K, 1.0 / (1.0 + tl.exp(-shared)), weight_K)
    W: tl.constexpr = K + L - E
    tl.store(weights + row * W + k_K, weight_K, mask=k_K < W)


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias_E: torch.Tensor | None = None,
    scale_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.route`."""
    rows, width = logits.shape[0], logits.shape[-1]
    experts, each = routing.num_experts, routing.num_experts_per_tok
    assert width == experts or (scale_E is None and routing.logit_scale == 1)
    chosen_NK = logits.new_empty(rows, each, dtype=torch.int64)
    weights_NW = logits.new_empty(rows, each + width - experts)
    block_g = triton.next_power_of_2(routing.n_group)
    block_m = triton.next_power_of_2(experts // routing.n_group)
    if rows == 0:
        return chosen_NK, weights_NW
    _route_kernel[(rows,)](
        logits.contiguous(),
        bias_E,
        scale_E,
        chosen_NK,
        weights_NW,
        routing.logit_scale,
        routing.routed_scaling_factor,
        width,
        logits.shape[1] if logits.dim() == 3 else 1,
        experts,
        each,
        routing.n_group,
        routing.topk_group,
        block_g,
        block_m,
        triton.next_power_of_2(weights_NW.shape[1]),
        routing.scoring == "sigmoid",
        routing.norm_topk_prob,
        num_warps=1,
        **dependent(logits.device),
    )
    return chosen_NK, weights_NW


@triton.jit
def weighted_sum(
    parts,
    weights,
    shared,
    row,
    column_B,
    exists_B,
    C: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[B] float32: some columns of the sum of a row's parts, the first added first. Every product and sum is fused, so
    that it has the same bits in every kernel."""
    total_B = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        part_B = tl.load(parts + (row * K + k) * C + column_B, mask=exists_B, other=0.0).to(tl.float32)
        total_B = tl.fma(part_B, tl.load(weights + row * W + k), total_B)
    if shared is not None:
        shared_B = tl.load(shared + row * C + column_B, mask=exists_B, other=0.0).to(tl.float32)
        if W > K:
            total_B = tl.fma(shared_B, tl.load(weights + row * W + K), total_B)
        else:
            total_B += shared_B
    return total_B


@triton.jit
def _combine_kernel(
    parts,
    weights,
    shared,
    out,
    C: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, blocks of columns)."""
    give_way(tl.num_programs(0), DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists_B = column_B < C
    total_B = weighted_sum(parts, weights, shared, row, column_B, exists_B, C, K, W, BLOCK)
    tl.store(out + row * C + column_B, total_B, mask=exists_B)


def combine(parts_NKC: torch.Tensor, weights_NW: torch.Tensor, shared_NC: torch.Tensor | None = None) -> torch.Tensor:
    """`Ops.combine`."""
    rows, each, width = parts_NKC.shape
    out_NC = parts_NKC.new_empty(rows, width)
    block = min(COMBINE_COLUMNS, triton.next_power_of_2(width))
    _combine_kernel[rows, triton.cdiv(width, block)](
        parts_NKC.contiguous(),
        weights_NW.contiguous(),
        None if shared_NC is None else shared_NC.contiguous(),
        out_NC,
        width,
        each,
        weights_NW.shape[1],
        block,
        num_warps=max(1, min(4, block // 256)),
        **dependent(parts_NKC.device),
    )
    return out_NC
