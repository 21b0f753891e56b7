"""Attention for training, causal over whole sequences without pages, and for generating sequences that grow in step.

Shape legend: B sequences of T rows, N = B * T flat rows, H query heads, G key/value heads, D head width, Q queries and
K keys of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stridelm.attention.base import HeadsInput
from stridelm.kernels.plain import roped

ALIGNED = 8
"""Kernels that take a mask need its rows to be a multiple of this many keys."""


def by_sequence(x_NHD: torch.Tensor, batch: int) -> torch.Tensor:
    """[N, H, D] -> [B, H, T, D]."""
    return x_NHD.unflatten(0, (batch, -1)).transpose(1, 2)


def by_row(x_BHTD: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] -> [N, H, D]."""
    return x_BHTD.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class DenseMix:
    """The model's `mix` for `batch` sequences of equal length, one after another in the flat rows."""

    batch: int

    def __call__(self, layer: int, inputs: HeadsInput) -> torch.Tensor:
        q, k, v = (by_sequence(x, self.batch) for x in roped(inputs.qkv_NXD, inputs.rope))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return by_row(out)


class CachedMix:
    """The same for growing sequences: each call of a layer appends rows to those of earlier calls, whole sequences at
    first and then one row of each."""

    def __init__(self, batch: int, length: int) -> None:
        """length: maximum length of the sequences."""
        self.batch, self.length = batch, length
        self._filled: dict[int, int] = {}
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, inputs: HeadsInput) -> torch.Tensor:
        q, k, v = (by_sequence(x, self.batch) for x in roped(inputs.qkv_NXD, inputs.rope))
        rows, start = q.shape[2], self._filled.get(layer, 0)
        assert rows == 1 or not start
        if not start:
            shape = (*k.shape[:2], self.length, k.shape[3])
            self._cache[layer] = k.new_empty(shape), v.new_empty(shape)
        self._filled[layer] = stop = start + rows
        keys, values = self._cache[layer]
        keys[:, :, start:stop], values[:, :, start:stop] = k, v
        out = F.scaled_dot_product_attention(
            q,
            keys[:, :, :stop],
            values[:, :, :stop],
            is_causal=not start,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return by_row(out)


def masked_attention(
    q_BHQD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    mask_QK: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """[B, H, Q, D]; mask_QK: whether a query sees a key, bool. scale: by default the inverse of D's square root."""
    groups, shared = k_BGKD.shape[1], q_BHQD.shape[1] // k_BGKD.shape[1]
    missing = -mask_QK.shape[1] % ALIGNED
    if missing:
        k_BGKD, v_BGKD = (F.pad(x, (0, 0, 0, missing)) for x in (k_BGKD, v_BGKD))
        mask_QK = F.pad(mask_QK, (0, missing))
    # Kernels that take a mask do not support grouped heads, so query heads that share keys are concatenated as rows.
    q = q_BHQD.unflatten(1, (groups, shared)).flatten(2, 3)
    out = F.scaled_dot_product_attention(q, k_BGKD, v_BGKD, attn_mask=mask_QK.repeat(shared, 1), scale=scale)
    return out.unflatten(2, (shared, -1)).flatten(1, 2)


def flat_positions(batch: int, length: int, device: torch.device | str) -> torch.Tensor:
    """0..T-1 for each of B sequences: [N] int64."""
    return torch.arange(length, device=device).repeat(batch)
