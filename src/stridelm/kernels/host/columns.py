"""Columns of the tables from which layer.py takes its tensors: int64, of addresses, sizes and float32 bits. Imports no
Numba, so that models can fill them on any device."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

(
    MIXER_NORM,
    QKV,
    QKV_BIAS,
    QK_NORMS,
    QK_EPS,
    COS,
    SIN,
    ROTATED,
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
    AFTER_MIXER,
    AFTER_MLP,
    FACTOR,
) = range(23)
"""Of a layer's weights. Products' weights are blocks (product.py); 0 where there is no bias, or are no norms of heads,
or no norm before attention. KV_HEADS is 0 for a layer that reads another's entries. ROTATED is how many of a head's
dimensions are rotated, the first ones; ACTIVATION is the number in ACTIVATIONS. AFTER_MIXER and AFTER_MLP are weights
of norms of what is added to the stream, and the stream is multiplied by FACTOR in the end; 0 where there is none."""
MLP_WIDTHS = 64
"""What MLP_WIDTH is a multiple of, on any CPU."""
KEYS, VALUES, KIND, WINDOW, SHARED, SCALE = range(6)
"""Of where a layer's entries are stored and how they are read: which row of the next table has its slots, how far back
a row sees, query heads per KV head, and the scores' factor."""
SLOTS, PAGES = range(2)
"""Of layers that attend alike: the rows' slots in the pool, and the spans' page tables."""
(
    THREADS,
    SPANS,
    TABLE_PAGES,
    PAGE_SIZE,
    FIRSTS,
    STARTS,
    REALS,
    DRAFT_ROWS,
    ANCESTORS,
    SEEN_AT,
    ROWS,
    WIDTH,
    POSITIONS,
    EPS,
    X,
    DELTA,
    WAITING,
    NORM,
    NORMED,
    LOOKERS,
    LOOKING,
    KEPT,
    READ,
    READS,
) = range(24)
"""Of a call, a table of one row. FIRSTS to SEEN_AT are its Geometry's, SEEN_AT the positions by which rows see, and
POSITIONS those by which they are rotated. X is the residual stream, [ROWS, WIDTH]; DELTA is what is still to be added
to it, if WAITING; NORM is a norm's weight, 0 for none. LOOKERS are the rows of a single layer that attend and go on,
LOOKING in number, for which the Geometry is, and KEPT is their stream; LOOKERS is 0 if all do. READ is what a single
layer without a norm before its attention reads, [ROWS, READS]."""


@cache
def bits(x: float) -> int:
    """A float32's, as a number for a table."""
    return int(np.float32(x).view(np.int32))


def address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Of a tensor of this type, which must live for as long as the address is used."""
    assert tensor.dtype is dtype and tensor.is_contiguous()
    return tensor.data_ptr()
