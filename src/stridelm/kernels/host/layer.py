"""A whole decoder layer for few rows: one call, where the host would otherwise make nine and prepare each.

It runs the kernels of rows.py, attention.py and product.py one after another, so its bits are theirs.

Legend: as in kernels/ops.py and attention.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numba as nb
import numpy as np

from stridelm.kernels.host.attention import attend
from stridelm.kernels.host.product import product
from stridelm.kernels.host.rows import add_norm, gate_gelu, gate_gelu_tanh, gate_silu, norm, rope_and_store


@nb.njit(cache=True)
def layer(
    x_NC,
    delta_NC,
    waiting,
    mixer_norm_C,
    mlp_norm_C,
    eps,
    qkv,
    qkv_bias,
    o,
    o_bias,
    gate_up,
    gate_up_bias,
    down,
    down_bias,
    activation,
    qk_norms_2D,
    qk_eps,
    positions_N,
    cos_LF,
    sin_LF,
    heads,
    keys_PGD,
    values_PGD,
    slots_N,
    slots_RL,
    tiles_T3,
    limits_N,
    bases_N,
    ancestors_N,
    window,
    scale,
):
    """Add to the residual stream x, in place, and write to `delta` what is still to be added to it. waiting:
    whether `delta` is still to be added before. Products' weights are blocks (product.py), biases may be empty.
    activation: its number in ACTIVATIONS."""
    rows, (_, kv_heads, size) = x_NC.shape[0], keys_PGD.shape
    normed = np.empty_like(x_NC)
    if waiting:
        add_norm(x_NC, delta_NC, mixer_norm_C, eps, normed)
    else:
        norm(x_NC, mixer_norm_C, eps, normed)
    projected = np.empty((rows, heads + 2 * kv_heads, size), x_NC.dtype)
    product(normed, qkv, qkv_bias, projected.reshape(rows, (heads + 2 * kv_heads) * size))
    q, mixed = np.empty((rows, heads, size), x_NC.dtype), np.empty((rows, heads, size), x_NC.dtype)
    rope_and_store(projected, qk_norms_2D, qk_eps, positions_N, cos_LF, sin_LF, slots_N, q, keys_PGD, values_PGD)
    attend(q, keys_PGD, values_PGD, slots_RL, tiles_T3, limits_N, bases_N, ancestors_N, window, scale, mixed)
    product(mixed.reshape(rows, heads * size), o, o_bias, delta_NC)
    add_norm(x_NC, delta_NC, mlp_norm_C, eps, normed)
    width = down.shape[1] * down.shape[2] * 2
    both, gated = np.empty((rows, 2 * width), x_NC.dtype), np.empty((rows, width), x_NC.dtype)
    product(normed, gate_up, gate_up_bias, both)
    if activation == 0:
        gate_silu(both, gated)
    elif activation == 1:
        gate_gelu_tanh(both, gated)
    else:
        gate_gelu(both, gated)
    product(gated, down, down_bias, delta_NC)
