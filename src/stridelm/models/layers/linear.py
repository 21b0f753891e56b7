"""The linear layer: matrices of a checkpoint one above the other, and how its product is chosen for serving."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.kernels.ops import Ops
from stridelm.models.layers.products import InOrderProduct, PackedProduct, Product, chosen
from stridelm.models.layers.slots import ModelPart, Slots, WeightSlot


class Linear(ModelPart):
    """y = x W^T + b over rows: [N, in] -> [N, out]. The weight is stored [out, in], as checkpoints have it."""

    def __init__(self, in_features: int, out_features: int | Mapping[str, int], bias: bool = False) -> None:
        """out_features: of several matrices by what a checkpoint calls them, from the first output feature on."""
        super().__init__()
        outs = {"": out_features} if isinstance(out_features, int) else out_features
        self._outs = {f"{name}." if name else "": size for name, size in outs.items()}
        width = sum(outs.values())
        self.weight = nn.Parameter(torch.empty(width, in_features))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.product: Product = F.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)

    def gated(self, x: torch.Tensor, ops: Ops, activation: str) -> torch.Tensor:
        """`ops.gate` of the product, [N, out / 2]: one kernel where there is one."""
        if isinstance(self.product, InOrderProduct) and self.product.is_ours(x, gated=True):
            return self.product(x, self.weight, self.bias, activation)
        return ops.gate(self(x), activation)

    def slots(self, theirs: str = "") -> Slots:
        stop = 0
        for matrix, size in self._outs.items():
            start, stop = stop, stop + size
            for name in ("weight", "bias") if self.bias is not None else ("weight",):
                yield f"{theirs}{matrix}{name}", WeightSlot(name, start, stop)


def set_products(model: nn.Module, *, deterministic: bool) -> None:
    """Choose each Linear's product for serving, by device, dtype and whether equal bits are promised.

    A packed weight replaces the original, unless a tied embedding still reads it.
    """
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for layer in model.modules():
        if isinstance(layer, Linear):
            weight = layer.weight
            layer.product = chosen(weight, layer.bias is not None, deterministic=deterministic)
            if isinstance(layer.product, PackedProduct) and id(weight) not in tied:
                layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
