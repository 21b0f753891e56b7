"""The row operations of a decoder, as one interface with several implementations.

Legend: N rows, C hidden width, I MLP width, X = H + 2G heads side by side (H query, G key, G value heads), D head size,
P pool slots, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""Activations of a gate: x / (1 + e^-x); x Phi(x), with Phi the normal distribution function (Hendrycks and Gimpel
2016, arXiv 1606.08415), approximated by tanh(sqrt(2 / pi) (x + 0.044715 x^3)); and the same by the error function."""


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class QKRope:
    """How a layer's queries and keys are made from their projections: a norm over each head if the model has one, then
    the rotation by the row's position."""

    heads: int
    kv_heads: int
    positions: torch.Tensor
    """[N] int64."""
    cos_LF: torch.Tensor
    """[L, D / 2] float32 by position; dimension i is paired with i + D / 2."""
    sin_LF: torch.Tensor
    norms: torch.Tensor | None = None
    """[2 D] norm weights: for queries, then for keys."""
    eps: float = 0.0


class Ops(Protocol):
    """Everything is computed in float32 (float64 for float64) and rounded once, when it is stored."""

    device: ClassVar[str | None]
    """Device type that the set is made for; None: any."""
    dtypes: ClassVar[frozenset[torch.dtype]]

    def prepare(self, dtype: torch.dtype, *, normed_heads: bool = False, activation: str = "silu") -> None:
        """Compile what a layer of this dtype needs, so that no request waits for compilation."""
        ...

    def norm(self, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4)."""
        ...

    def add_norm(
        self, x_NC: torch.Tensor, delta_NC: torch.Tensor, weight_C: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, its norm). x may be overwritten."""
        ...

    def gate(self, gate_up_N2I: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """activation(gate) * up, [N, I] (Shazeer 2020, arXiv 2002.05202). activation: one of ACTIVATIONS."""
        ...

    def rope_and_store(
        self,
        qkv_NXD: torch.Tensor,
        rope: QKRope,
        keys_PGD: torch.Tensor,
        values_PGD: torch.Tensor,
        slots_N: torch.Tensor,
    ) -> torch.Tensor:
        """Write each row's rotated keys and its values to its slot of a layer's pool; returns the rotated queries
        [N, H, D]. slots_N: int64."""
        ...
