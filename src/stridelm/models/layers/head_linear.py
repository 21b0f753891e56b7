"""A matrix for each head, stacked in one tensor, which may be applied from either side."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.models.layers.products import TILE_ROWS
from stridelm.models.layers.slots import ModelPart, Slots, Split, WeightSlot


class HeadLinear(ModelPart):
    """Heads' matrices [out, in], one below the other, as in checkpoints: [H * out, in]. `parts` names consecutive runs
    of each head's outputs, which are applied separately."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, name: str, heads: int, in_features: int, parts: tuple[int, ...], split: Split) -> None:
        """name: in checkpoints. heads: of the whole layer. parts: sizes of the runs. Raises ValueError if the heads
        cannot be divided into equal shares."""
        super().__init__()
        self.name, self.split, self.parts = name, split, parts
        self.heads = split.share(0, heads)
        self.weight = nn.Parameter(torch.empty(self.heads * sum(parts), in_features))
        self._exact = False
        """Whether a row's bits may not depend on the rows beside it."""

    def choose_products(self, *, deterministic: bool) -> None:
        self._exact = deterministic

    def forward(self, part: int, x_NHI: torch.Tensor) -> torch.Tensor:
        """[N, H, out]: each head's matrix times its rows."""
        return self._product(x_NHI, self._matrices(part).transpose(1, 2))

    def transposed(self, part: int, x_NHO: torch.Tensor) -> torch.Tensor:
        """[N, H, in]: each head's transposed matrix times its rows."""
        return self._product(x_NHO, self._matrices(part))

    def _matrices(self, part: int) -> torch.Tensor:
        """[H, out, in]."""
        own = self._parameters["weight"]
        assert own is not None
        start = sum(self.parts[:part])
        return own.view(self.heads, sum(self.parts), -1)[:, start : start + self.parts[part]]

    def _product(self, x_NHA: torch.Tensor, weight_HAB: torch.Tensor) -> torch.Tensor:
        x_HNA = x_NHA.transpose(0, 1)
        if not self._exact:
            return torch.bmm(x_HNA, weight_HAB).transpose(0, 1)
        if x_NHA.is_cuda and x_NHA.dtype != torch.float64:
            from stridelm.kernels.head_products import head_products

            return head_products(x_NHA, weight_HAB)
        # Every call has the same shape, for which a library has one kernel.
        rows = x_HNA.shape[1]
        tiles = F.pad(x_HNA, (0, 0, 0, -rows % TILE_ROWS)).split(TILE_ROWS, dim=1)
        return torch.cat([torch.bmm(tile, weight_HAB) for tile in tiles], dim=1)[:, :rows].transpose(0, 1)

    def slots(self, theirs: str = "") -> Slots:
        yield f"{theirs}{self.name}.weight", WeightSlot("weight", 0, self.weight.shape[0], self.split)
