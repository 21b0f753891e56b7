"""Entries of layers in their pools, in torch: how they are written, read and moved, in the model's dtype or eight bits.

Eight bits (e4m3: Micikevicius et al. 2022, arXiv 2209.05433) hold an entry divided by its layer's scale, limited to
+-448 and rounded once, from the precision in which it was computed. The scale is fixed, so that what is stored depends
on nothing but the row itself. Read back, a number is exact in float16, bfloat16 and wider dtypes.

Legend: P slots of the pool, N rows.
"""

from __future__ import annotations

import torch

from stridelm.kernels.plain_fp8 import E4M3, LARGEST


def wide(stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """In what entries of a model in `dtype` are handed to `write`, so that they are rounded once."""
    return torch.promote_types(dtype, torch.float32) if stored == E4M3 else dtype


def write(pool_PX: torch.Tensor, slots_N: torch.Tensor, entries_NX: torch.Tensor, scale: float = 1.0) -> None:
    """Entries to their slots. scale: of entries in eight bits."""
    if pool_PX.dtype == E4M3:
        entries_NX = (entries_NX * (1 / scale)).clamp(-LARGEST, LARGEST)  # a NaN stays one
    as_moved(pool_PX).index_copy_(0, slots_N, as_moved(entries_NX.to(pool_PX.dtype)))


def read(pool_PX: torch.Tensor, slots_N: torch.Tensor) -> torch.Tensor:
    """[N, ...] in the pool's dtype."""
    return as_moved(pool_PX).index_select(0, slots_N).view(pool_PX.dtype)


def as_moved(pool_PX: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch can index: eight bits it cannot, on every device."""
    return pool_PX.view(torch.uint8) if pool_PX.dtype == E4M3 else pool_PX
