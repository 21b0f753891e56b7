"""Attention for training: whole sequences side by side, plainly causal, no pages.

Shape legend: B sequences of T rows, N = B * T flat rows, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stridelm.kernels.ops import Turn
from stridelm.kernels.plain import turned


def by_sequence(x_NHD: torch.Tensor, batch: int) -> torch.Tensor:
    """[N, H, D] -> [B, H, T, D]."""
    return x_NHD.unflatten(0, (batch, -1)).transpose(1, 2)


def by_row(x_BHTD: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] -> [N, H, D]."""
    return x_BHTD.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class DenseAttend:
    """The model's `attend` for `batch` sequences of equal length, one after another in the flat rows."""

    batch: int

    def __call__(self, layer: int, qkv_NXD: torch.Tensor, turn: Turn) -> torch.Tensor:
        q, k, v = (by_sequence(x, self.batch) for x in turned(qkv_NXD, turn))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return by_row(out)


def flat_positions(batch: int, length: int, device: torch.device | str) -> torch.Tensor:
    """0..T-1 for each of B sequences: [N] int64."""
    return torch.arange(length, device=device).repeat(batch)
