"""A mixture's router on a CPU: scores, the choice of experts, and the weighted sum of what they make of a row. A row's
numbers depend on that row alone, because one task computes them in a fixed order.

Legend: as in kernels/ops.py; H hidden width, L logits.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
import torch
from numba import prange

from stridelm.kernels.host.arithmetic import DTYPES, by_lanes, exp, follow_torch, in_order, kernel, narrow, widen
from stridelm.kernels.host.memory import array
from stridelm.kernels.ops import Routing
from stridelm.kernels.plain import whole_logits

SIGMOID = 1
"""Number of a scoring; 0 is softmax."""


@by_lanes
def _dot(row, expert, x_NH, weight_LH):
    total = np.float32(0)
    for i in range(x_NH.shape[1]):
        total += widen(x_NH[row, i]) * weight_LH[expert, i]
    return total


@kernel
def _scores(x_NH, weight_LH, out_NL):
    for row in prange(x_NH.shape[0]):
        for expert in range(weight_LH.shape[0]):
            out_NL[row, expert] = _dot(row, expert, x_NH, weight_LH)


def scores(x_NH: torch.Tensor, weight_LH: torch.Tensor, bias: None) -> torch.Tensor:
    """x W^T in float32, [N, L]. weight: float32."""
    x_NH = x_NH if x_NH.dtype in DTYPES else x_NH.float()
    out_NL = x_NH.new_empty(x_NH.shape[0], weight_LH.shape[0], dtype=torch.float32)
    follow_torch()
    _scores(array(x_NH.contiguous()), array(weight_LH), array(out_NL))
    return out_NL


@in_order
def _sigmoid(x):
    return np.float32(1) / (np.float32(1) + exp(min(-x, np.float32(88))))


@in_order
def _softmax(row, logits_NL, scores_E):
    most = logits_NL[row, 0]
    for e in range(scores_E.shape[0]):
        most = max(most, logits_NL[row, e])
    total = np.float32(0)
    for e in range(scores_E.shape[0]):
        x = logits_NL[row, e] - most
        scores_E[e] = exp(x) if x == x else x
        total += scores_E[e]
    for e in range(scores_E.shape[0]):
        scores_E[e] /= total


@in_order
def _leave_out_groups(choice_E, groups, kept):
    """Make the choice -inf in all groups but those whose two best have the largest sums."""
    size = choice_E.shape[0] // groups
    best_G = np.empty(groups, np.float32)
    for group in range(groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for e in range(group * size, (group + 1) * size):
            if choice_E[e] > first:
                first, second = choice_E[e], first
            elif choice_E[e] > second:
                second = choice_E[e]
        best_G[group] = first + second
    for group in range(groups):
        before = 0
        for other in range(groups):
            if best_G[other] > best_G[group] or (best_G[other] == best_G[group] and other < group):
                before += 1
        if before >= kept:
            for e in range(group * size, (group + 1) * size):
                choice_E[e] = np.float32(-np.inf)


@kernel
def _route(logits_NL, bias_E, scoring, groups, kept, renormalises, scale, chosen_NK, weights_NW):
    count = chosen_NK.shape[1]
    experts = logits_NL.shape[1] - (weights_NW.shape[1] - count)
    for row in prange(logits_NL.shape[0]):
        scores_E, choice_E = np.empty(experts, np.float32), np.empty(experts, np.float32)
        if scoring == SIGMOID:
            for e in range(experts):
                scores_E[e] = _sigmoid(logits_NL[row, e])
        else:
            _softmax(row, logits_NL, scores_E)
        for e in range(experts):
            x = scores_E[e] + bias_E[e] if bias_E.shape[0] else scores_E[e]
            choice_E[e] = x if x == x else np.float32(np.inf)  # a weight that was never loaded shows up
        if groups > 1:
            _leave_out_groups(choice_E, groups, kept)
        taken_E = np.zeros(experts, np.bool_)
        total = np.float32(0)
        for k in range(count):
            best = -1
            for e in range(experts):
                if not taken_E[e] and (best < 0 or choice_E[e] > choice_E[best]):
                    best = e
            taken_E[best] = True
            chosen_NK[row, k] = best
            weights_NW[row, k] = scores_E[best]
            total += scores_E[best]
        for k in range(count):
            if renormalises:
                weights_NW[row, k] /= total + np.float32(1e-20)
            weights_NW[row, k] *= scale
        if weights_NW.shape[1] > count:
            weights_NW[row, count] = _sigmoid(logits_NL[row, experts])


_NO_BIAS = np.empty(0, np.float32)


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias_E: torch.Tensor | None = None,
    scale_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.route`."""
    logits_NL = whole_logits(logits)
    rows, width = logits_NL.shape
    experts, each = routing.num_experts, routing.num_experts_per_tok
    if routing.logit_scale != 1:
        assert width == experts
        logits_NL = logits_NL * routing.logit_scale
    chosen_NK = torch.empty(rows, each, dtype=torch.int64)
    weights_NW = torch.empty(rows, each + width - experts)
    follow_torch()
    _route(
        array(logits_NL.contiguous()),
        _NO_BIAS if bias_E is None else array(bias_E),
        SIGMOID if routing.scoring == "sigmoid" else 0,
        routing.n_group,
        routing.topk_group,
        routing.norm_topk_prob,
        np.float32(routing.routed_scaling_factor),
        array(chosen_NK),
        array(weights_NW),
    )
    if scale_E is not None:
        assert width == experts
        weights_NW *= scale_E[chosen_NK]
    return chosen_NK, weights_NW


@kernel
def _combine(parts_NKC, weights_NW, shared_NC, out_NC):
    count = parts_NKC.shape[1]
    for row in prange(parts_NKC.shape[0]):
        total_C = np.zeros(parts_NKC.shape[2], np.float32)
        for k in range(count):
            weight = weights_NW[row, k]
            for i in range(total_C.shape[0]):
                total_C[i] += weight * widen(parts_NKC[row, k, i])
        if shared_NC.shape[0]:
            weight = weights_NW[row, count] if weights_NW.shape[1] > count else np.float32(1)
            for i in range(total_C.shape[0]):
                total_C[i] += weight * widen(shared_NC[row, i])
        for i in range(total_C.shape[0]):
            out_NC[row, i] = narrow(total_C[i], out_NC)


def combine(parts_NKC: torch.Tensor, weights_NW: torch.Tensor, shared_NC: torch.Tensor | None = None) -> torch.Tensor:
    """`Ops.combine`."""
    rows, _, width = parts_NKC.shape
    out_NC = parts_NKC.new_empty(rows, width)
    follow_torch()
    shared = out_NC[:0] if shared_NC is None else shared_NC
    _combine(array(parts_NKC), array(weights_NW), array(shared), array(out_NC))
    return out_NC
