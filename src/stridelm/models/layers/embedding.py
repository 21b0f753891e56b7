"""Embeddings of tokens that are multiplied by a constant."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn


class Embedding(nn.Embedding):
    """ids [N] int64 -> rows of the table times `scale`, which is first rounded to the table's dtype, as transformers
    does."""

    weight: nn.Parameter

    def __init__(self, count: int, width: int, scale: float = 1.0) -> None:
        # With a weight given, none is drawn, which on the meta device would import torch's compiler.
        super().__init__(count, width, _weight=torch.empty(count, width))
        self.scale = scale

    def lookup(self, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(the table, ids) if embeddings are its rows, else (the embeddings, None)."""
        return (self.weight, ids_N) if self.scale == 1 else (self(ids_N), None)

    def forward(self, ids_N: torch.Tensor) -> torch.Tensor:
        x_NW = super().forward(ids_N)
        return x_NW if self.scale == 1 else x_NW * _rounded(self.scale, x_NW.dtype)


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(scale, dtype=dtype, device="cpu"))
