"""Columns of the tables from which layer.py takes its tensors: int64, of addresses, sizes and float32 bits. Imports no
Numba, so that models can fill them on any device."""

from __future__ import annotations

import numpy as np

(
    MIXER_NORM,
    QKV,
    QKV_BIAS,
    QK_NORMS,
    QK_EPS,
    COS,
    SIN,
    HEADS,
    KV_HEADS,
    HEAD_SIZE,
    OUT,
    OUT_BIAS,
    MLP_NORM,
    GATE_UP,
    GATE_UP_BIAS,
    MLP_WIDTH,
    ACTIVATION,
    DOWN,
    DOWN_BIAS,
) = range(19)
"""Of a layer's weights. Products' weights are blocks (product.py); 0 where there is no bias, or are no norms of heads.
ACTIVATION is the number in ACTIVATIONS."""
KEYS, VALUES, KIND = range(3)
"""Of a layer's pool, and of its row in the following table."""
SLOTS, PAGES, WINDOW, SHARED, SCALE = range(5)
"""Of layers that attend alike: the rows' slots in the pool, page tables, how far back a row sees, query heads per KV
head, and the scores' factor."""


def bits(x: float) -> int:
    """A float32's, as a number for a table."""
    return int(np.float32(x).view(np.int32))
