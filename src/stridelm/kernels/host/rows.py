"""The row-wise operations of a decoder on a CPU. Everything is computed in float32 and rounded once.

Legend: N rows, C hidden width, I MLP width, H query heads, G KV heads, D head size, F pairs that are rotated, P pool
slots, L positions.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from numba import prange
from numba.core.extending import register_jitable

from stridelm.kernels.host.arithmetic import by_lanes, exp, in_order, kernel, narrow, widen


@by_lanes
def _inverse_rms(x, eps):
    total = np.float32(0)
    for i in range(x.shape[0]):
        value = widen(x[i])
        total += value * value
    return np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + eps)


@in_order
def norm_row(row, x_NC, weight_C, eps, out_NC):
    scale = _inverse_rms(x_NC[row], eps)
    for i in range(x_NC.shape[1]):
        out_NC[row, i] = narrow(widen(x_NC[row, i]) * scale * widen(weight_C[i]), out_NC)


@in_order
def add_row(row, x_NC, delta_NC):
    for i in range(x_NC.shape[1]):
        x_NC[row, i] = narrow(widen(x_NC[row, i]) + widen(delta_NC[row, i]), x_NC)


@in_order
def scale_row(row, x_NC, factor_1):
    for i in range(x_NC.shape[1]):
        x_NC[row, i] = narrow(widen(x_NC[row, i]) * widen(factor_1[0]), x_NC)


@kernel
def norm(x_NC, weight_C, eps, out_NC):
    """Root-mean-square norm of each row."""
    for row in prange(x_NC.shape[0]):
        norm_row(row, x_NC, weight_C, eps, out_NC)


@kernel
def join_norms(token_VC, ids_N, token_weight_C, hidden_NC, hidden_weight_C, eps, hidden_first, out_MC):
    """Write the norms of rows `ids` of the tokens' embeddings and of the hidden states in turn."""
    for row in prange(hidden_NC.shape[0]):
        token, hidden = 2 * row + hidden_first, 2 * row + 1 - hidden_first
        for i in range(hidden_NC.shape[1]):
            out_MC[token, i], out_MC[hidden, i] = token_VC[ids_N[row], i], hidden_NC[row, i]
        norm_row(token, out_MC, token_weight_C, eps, out_MC)
        norm_row(hidden, out_MC, hidden_weight_C, eps, out_MC)


@kernel
def add_norm(x_NC, delta_NC, weight_C, eps, out_NC):
    """Add delta to x in place, rounded as it is stored, and write its norm."""
    for row in prange(x_NC.shape[0]):
        add_row(row, x_NC, delta_NC)
        norm_row(row, x_NC, weight_C, eps, out_NC)


@register_jitable
def _swish(x, s):
    """x / (1 + e^-s). Where e^-s exceeds what `exp` can return, x / e^88 is as good as zero."""
    return x / (np.float32(1) + exp(min(-s, np.float32(88))))


@register_jitable
def _normal(x):
    """The normal distribution function at x, within 1e-7 (Abramowitz and Stegun 1964, 7.1.26)."""
    z = abs(x) * np.float32(0.70710678)
    t = np.float32(1) / (np.float32(1) + np.float32(0.3275911) * z)
    p = np.float32(1.061405429) * t + np.float32(-1.453152027)
    p = p * t + np.float32(1.421413741)
    p = p * t + np.float32(-0.284496736)
    p = p * t + np.float32(0.254829592)
    beyond = np.float32(0.5) * p * t * exp(-z * z)
    return beyond if x < np.float32(0) else np.float32(1) - beyond


@in_order
def silu_row(row, gate_up_N2I, out_NI, first):
    """silu(gate) * up of one row, to columns of `out` from `first` on."""
    width = gate_up_N2I.shape[1] // 2
    for i in range(width):
        x = widen(gate_up_N2I[row, i])
        out_NI[row, first + i] = narrow(_swish(x, x) * widen(gate_up_N2I[row, width + i]), out_NI)


@in_order
def gelu_tanh_row(row, gate_up_N2I, out_NI, first):
    """gelu(gate) * up by the tanh form: x (1 + tanh u) / 2 is x / (1 + e^-2u)."""
    width = gate_up_N2I.shape[1] // 2
    for i in range(width):
        x = widen(gate_up_N2I[row, i])
        twice_u = x * (np.float32(1.5957691216) + np.float32(0.0713548163) * x * x)
        out_NI[row, first + i] = narrow(_swish(x, twice_u) * widen(gate_up_N2I[row, width + i]), out_NI)


@in_order
def gelu_row(row, gate_up_N2I, out_NI, first):
    """gelu(gate) * up."""
    width = gate_up_N2I.shape[1] // 2
    for i in range(width):
        x = widen(gate_up_N2I[row, i])
        out_NI[row, first + i] = narrow(x * _normal(x) * widen(gate_up_N2I[row, width + i]), out_NI)


@kernel
def gate_silu(gate_up_N2I, out_NI):
    for row in prange(out_NI.shape[0]):
        silu_row(row, gate_up_N2I, out_NI, 0)


@kernel
def gate_gelu_tanh(gate_up_N2I, out_NI):
    for row in prange(out_NI.shape[0]):
        gelu_tanh_row(row, gate_up_N2I, out_NI, 0)


@kernel
def gate_gelu(gate_up_N2I, out_NI):
    for row in prange(out_NI.shape[0]):
        gelu_row(row, gate_up_N2I, out_NI, 0)


GATES = {"silu": gate_silu, "gelu_tanh": gate_gelu_tanh, "gelu": gate_gelu}
"""By activation, each compiled separately, because a model needs only one."""


@in_order
def rope_heads(row, group, qkv_NXD, weights_2D, eps, positions_N, cos_LF, sin_LF, slots_N, q_NHD, keys_PGD, values_PGD):
    """`rope_and_store` of one row, for one KV head and the query heads that share it."""
    heads, kv_heads, size = q_NHD.shape[1], keys_PGD.shape[1], q_NHD.shape[2]
    pairs, shared = cos_LF.shape[1], heads // kv_heads
    normalised, stores = weights_2D.shape[0] > 0, qkv_NXD.shape[1] > heads
    slot, position = slots_N[row], positions_N[row]
    lane = np.empty(size, np.float32)
    for i in range(shared + 1 if stores else shared):
        is_query = i < shared
        head = group * shared + i if is_query else heads + group
        scale = _inverse_rms(qkv_NXD[row, head], eps) if normalised else np.float32(1)
        for d in range(size):
            lane[d] = widen(qkv_NXD[row, head, d]) * scale
        if normalised:
            kind = 0 if is_query else 1
            for d in range(size):
                lane[d] *= widen(weights_2D[kind, d])
        for d in range(pairs):
            low, high = lane[d], lane[pairs + d]
            c, s = cos_LF[position, d], sin_LF[position, d]
            lane[d], lane[pairs + d] = low * c - high * s, high * c + low * s
        for d in range(size):
            if is_query:
                q_NHD[row, head, d] = narrow(lane[d], q_NHD)
            else:
                keys_PGD[slot, group, d] = narrow(lane[d], keys_PGD)
    if stores:
        for d in range(size):
            values_PGD[slot, group, d] = qkv_NXD[row, heads + kv_heads + group, d]


@kernel
def rope_and_store(qkv_NXD, weights_2D, eps, positions_N, cos_LF, sin_LF, slots_N, q_NHD, keys_PGD, values_PGD):
    """Normalise queries and keys head by head (unless weights_2D is empty), rotate their first 2 F dimensions by their
    row's position, and write keys and values to their slots. qkv_NXD holds H query heads, then G key heads, then G
    value heads, or queries alone."""
    for row in prange(qkv_NXD.shape[0]):
        for group in range(keys_PGD.shape[1]):
            rope_heads(
                row, group, qkv_NXD, weights_2D, eps, positions_N, cos_LF, sin_LF, slots_N, q_NHD, keys_PGD, values_PGD
            )
