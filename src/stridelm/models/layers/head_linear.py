"""A matrix for each head, stacked in one tensor, which may be applied from either side."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from stridelm.models.layers.products import exact_product_by_head, product_by_head
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
        self._product = product_by_head

    def choose_products(self, *, deterministic: bool) -> None:
        self._product = exact_product_by_head if deterministic else product_by_head

    def forward(self, part: int, x_NHI: torch.Tensor) -> torch.Tensor:
        """[N, H, out]: each head's matrix times its rows."""
        return self._product(x_NHI, self.matrices(part).transpose(1, 2))

    def transposed(self, part: int, x_NHO: torch.Tensor) -> torch.Tensor:
        """[N, H, in]: each head's transposed matrix times its rows."""
        return self._product(x_NHO, self.matrices(part))

    def matrices(self, part: int) -> torch.Tensor:
        """[H, out, in]."""
        own = self._parameters["weight"]
        assert own is not None
        start = sum(self.parts[:part])
        return own.view(self.heads, sum(self.parts), -1)[:, start : start + self.parts[part]]

    def slots(self, theirs: str = "") -> Slots:
        yield f"{theirs}{self.name}.weight", WeightSlot("weight", 0, self.weight.shape[0], self.split)
