"""A mixture's router on a GPU: the choice of experts, and the weighted sum of what they make of a row, one launch each.

A row's bits depend on that row alone: a program works on one row, in an order that its widths define.

Legend: as in kernels/ops.py; L logits; in kernels G groups of M experts, B columns of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, wait_for_inputs
from stridelm.kernels.ops import Routing

COMBINE_COLUMNS = 1024
"""Columns of a row that a program adds up."""


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
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    M: tl.constexpr = E // G
    group_G = tl.arange(0, BLOCK_G)
    member_M = tl.arange(0, BLOCK_M)
    expert_GM = group_G[:, None] * M + member_M[None, :]
    exists_GM = (group_G < G)[:, None] & (member_M < M)[None, :]
    logit_GM = tl.load(logits + row * L + expert_GM, mask=exists_GM, other=float("-inf"))
    logit_GM *= logit_scale
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
    k_K = tl.arange(0, BLOCK_K)
    weight_K = tl.zeros([BLOCK_K], tl.float32)
    own_K = weight_K
    total = 0.0
    for k in range(K):
        best = tl.max(tl.max(choice_GM, 1), 0)
        at_GM = tl.where((choice_GM == best) & exists_GM, expert_GM, E - 1)
        expert = tl.min(tl.min(at_GM, 1), 0)
        weight = tl.sum(tl.sum(tl.where(expert_GM == expert, tl.where(exists_GM, score_GM, 0.0), 0.0), 1), 0)
        total += weight
        weight_K = tl.where(k_K == k, weight, weight_K)
        if own_scale is not None:
            own_K = tl.where(k_K == k, tl.load(own_scale + expert).to(tl.float32), own_K)
        choice_GM = tl.where((expert_GM == expert) & exists_GM, float("-inf"), choice_GM)
        tl.store(chosen + row * K + k, expert.to(tl.int64))
    if RENORMALISES:
        weight_K = weight_K / (total + 1e-20)
    weight_K = weight_K * scale
    if own_scale is not None:
        weight_K = weight_K * own_K
    if L > E:
        shared = tl.load(logits + row * L + E)
        weight_K = tl.where(k_K == K, 1.0 / (1.0 + tl.exp(-shared)), weight_K)
    W: tl.constexpr = K + L - E
    tl.store(weights + row * W + k_K, weight_K, mask=k_K < W)


def route(
    logits_NL: torch.Tensor,
    routing: Routing,
    bias_E: torch.Tensor | None = None,
    scale_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.route`."""
    rows, logits = logits_NL.shape
    experts, each = routing.num_experts, routing.num_experts_per_tok
    assert logits == experts or (scale_E is None and routing.logit_scale == 1)
    chosen_NK = logits_NL.new_empty(rows, each, dtype=torch.int64)
    weights_NW = logits_NL.new_empty(rows, each + logits - experts)
    block_g = triton.next_power_of_2(routing.n_group)
    block_m = triton.next_power_of_2(experts // routing.n_group)
    _route_kernel[(rows,)](
        logits_NL.contiguous(),
        bias_E,
        scale_E,
        chosen_NK,
        weights_NW,
        routing.logit_scale,
        routing.routed_scaling_factor,
        logits,
        experts,
        each,
        routing.n_group,
        routing.topk_group,
        block_g,
        block_m,
        triton.next_power_of_2(weights_NW.shape[1]),
        routing.scoring == "sigmoid",
        routing.norm_topk_prob,
        num_warps=max(1, min(4, block_g * block_m // 128)),
        **dependent(logits_NL.device),
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
