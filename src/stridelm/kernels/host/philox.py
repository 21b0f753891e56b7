"""The noise's integers on a CPU: bit-identical to kernels/philox.py, in one pass instead of fifty.

Legend: M rows, K tokens.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
import torch
from numba import prange

from stridelm.kernels.host.arithmetic import follow_torch, in_order, kernel
from stridelm.kernels.host.memory import array
from stridelm.kernels.philox import Columns

# Compiled code


@in_order
def _words(seed, c0, c1, c2, c3):
    """A block's four words. The casts are there because Numba widens integers to 64 bits, of which a vector holds half
    as many."""
    k0, k1 = np.uint32(seed), np.uint32(seed >> 32)
    for _ in range(10):
        a, b = np.uint64(c0) * np.uint64(0xD2511F53), np.uint64(c2) * np.uint64(0xCD9E8D57)
        c0, c1 = np.uint32(np.uint32(b >> np.uint64(32)) ^ c1 ^ k0), np.uint32(b)
        c2, c3 = np.uint32(np.uint32(a >> np.uint64(32)) ^ c3 ^ k1), np.uint32(a)
        k0, k1 = np.uint32(k0 + np.uint32(0x9E3779B9)), np.uint32(k1 + np.uint32(0xBB67AE85))
    return c0, c1, c2, c3


@kernel
def _fill(seed_M, position_M, sample_M, stream_M, words_MK):
    for row in prange(words_MK.shape[0]):
        position, sample, stream = np.uint32(position_M[row]), np.uint32(sample_M[row]), np.uint32(stream_M[row])
        for block in range(words_MK.shape[1] // 4):
            w0, w1, w2, w3 = _words(seed_M[row], np.uint32(block), position, sample, stream)
            # A third dimension of four would prevent the loop from being vectorised.
            words_MK[row, 4 * block] = w0
            words_MK[row, 4 * block + 1] = w1
            words_MK[row, 4 * block + 2] = w2
            words_MK[row, 4 * block + 3] = w3


@kernel
def _fill_at(seed_M, position_M, sample_M, stream_M, ids_MK, words_MK):
    for row in prange(ids_MK.shape[0]):
        position, sample, stream = np.uint32(position_M[row]), np.uint32(sample_M[row]), np.uint32(stream_M[row])
        for i in range(ids_MK.shape[1]):
            id = ids_MK[row, i]
            w0, w1, w2, w3 = _words(seed_M[row], np.uint32(id >> 2), position, sample, stream)
            low, high = w1 if id & 1 else w0, w3 if id & 1 else w2
            words_MK[row, i] = high if id & 2 else low


# Tensors in and out


def fill(words_MK: torch.Tensor, columns: Columns, ids_MK: torch.Tensor | None = None) -> None:
    """As in kernels/philox.py."""
    follow_torch()
    numbers = [array(each.contiguous()) for each in columns]
    if ids_MK is None:
        _fill(*numbers, array(words_MK))
    else:
        _fill_at(*numbers, array(ids_MK.contiguous()), array(words_MK))
