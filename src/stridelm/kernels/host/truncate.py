"""Where top-p cuts a row of logits, and the cut itself, on a CPU: bit-identical to mass.py and plain_logits.py.

In torch both are a dozen passes over rows and vocabulary. Exponentials are left to torch, whose last bits no other
library has: these kernels only compare, count and add integers.

Legend: M rows, V vocabulary.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
import torch
from numba import prange
from numba.core.extending import register_jitable

from stridelm.kernels.host.arithmetic import follow_torch, kernel
from stridelm.kernels.host.memory import array
from stridelm.kernels.mass import UNIT, weights
from stridelm.kernels.plain_logits import empty_ids
from stridelm.kernels.step_ops import Cut

_HALF = 1 << 16
"""Values of half a float32's bits."""


# Compiled code


@register_jitable
def _mass(weight):
    return np.int64(weight * np.float32(UNIT))


@kernel
def _find_nucleus(depths_MV, weights_MV, top_p_M, edge_M, last_M):
    """Radix selection in two digits: the upper half of the edge's bits, then the lower. As in mass.py, the mass of the
    tokens before the edge's last one is below the limit, and with it is not."""
    for row in prange(depths_MV.shape[0]):
        bits, weight_V = depths_MV[row].view(np.uint32), weights_MV[row]
        buckets = np.empty(_HALF, np.int64)
        edge = spent = limit = np.int64(0)
        for shift in (16, 0):
            buckets[:] = 0
            for i in range(bits.shape[0]):
                key = np.int64(bits[i]) & 0x7FFFFFFF  # without the sign, which only NaN may have
                if key >> (shift + 16) == edge:
                    buckets[(key >> shift) % _HALF] += _mass(weight_V[i])
            if shift:
                limit = np.int64(np.ceil(np.float64(buckets.sum()) * np.float64(top_p_M[row])))
            digit = 0
            while digit < _HALF - 1 and spent + buckets[digit] < limit:
                spent += buckets[digit]
                digit += 1
            edge = edge * _HALF + digit
        last = -1
        while last < bits.shape[0] - 1 and spent < limit:
            last += 1
            if np.int64(bits[last]) == edge:
                spent += _mass(weight_V[last])
        edge_M[row], last_M[row] = np.uint32(edge).view(np.float32), last


@kernel
def _keep(scaled_MV, peak_M, low_M, edge_M, last_M, count_M, ids_MK):
    for row in prange(scaled_MV.shape[0]):
        peak, low, edge, last = peak_M[row], low_M[row], edge_M[row], last_M[row]
        count = 0
        for i in range(scaled_MV.shape[1]):
            x = scaled_MV[row, i]
            depth = peak - x
            dropped = (x < low) | (depth > edge) | ((depth == edge) & (i > last)) | (x == -np.inf)
            scaled_MV[row, i] = np.float32(-np.inf) if dropped else x
            count += not dropped
        count_M[row] = count
        if count <= ids_MK.shape[1]:
            place = 0
            for i in range(scaled_MV.shape[1]):
                if scaled_MV[row, i] != -np.inf:
                    ids_MK[row, place] = i
                    place += 1


# Tensors in and out


def nucleus(depths_MV: torch.Tensor, top_p_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As in mass.py. The last id of a row of nothing but -inf is unspecified."""
    follow_torch()
    edge_M, last_M = torch.empty_like(top_p_M), torch.empty_like(top_p_M, dtype=torch.int64)
    _find_nucleus(*map(array, (depths_MV, weights(depths_MV), top_p_M, edge_M, last_M)))
    return edge_M, last_M


def keep(scaled_MV: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """As in plain_logits.py."""
    follow_torch()
    count_M, ids_MK = torch.empty_like(cut.last_M), empty_ids(scaled_MV)
    _keep(*map(array, (scaled_MV, cut.peak_M, cut.low_M, cut.edge_M, cut.last_M, count_M, ids_MK)))
    return count_M, ids_MK
