"""The linear layer: matrices of a checkpoint one above the other, in some format, whole or cut into shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.kernels.ops import Ops
from stridelm.models.layers.products import InOrderProduct, PackedProduct, Product, chosen
from stridelm.models.layers.slots import WHOLE, ModelPart, Slots, Split, WeightSlot


class WeightFormat(Protocol):
    """How a matrix is stored and multiplied. One object serves any number of layers."""

    kept: frozenset[str]
    """Parameters that stay in the dtype that they are made in; others take the model's."""

    def parameters(self, in_features: int, out_features: int, bias: bool) -> Mapping[str, nn.Parameter | None]:
        """A layer's parameters by name, in the order in which products take them. "bias" is there in any format, None
        if it is not asked for."""
        ...

    def slots(self, layer: Linear, start: int, stop: int) -> Slots:
        """What a checkpoint holds of one matrix, whose output features are `start` to `stop` of the layer's, by its
        names behind the matrix's own; all of it in the layer's split, as far as that cuts it."""
        ...

    @property
    def plain(self) -> Product:
        """The product that runs until one is chosen: on any device, and to train where that can be."""
        ...

    def product(self, layer: Linear, *, deterministic: bool, shared: bool) -> Product | None:
        """The product to serve the layer's device and dtype with; None if equal bits are asked for and it has none that
        keeps them. It may replace the layer's weight by a copy of its own, unless another module reads that too."""
        ...


class DenseFormat:
    """Numbers as they are multiplied."""

    kept: frozenset[str] = frozenset()
    plain = staticmethod(F.linear)

    def parameters(self, in_features: int, out_features: int, bias: bool) -> Mapping[str, nn.Parameter | None]:
        weight = nn.Parameter(torch.empty(out_features, in_features))
        return {"weight": weight, "bias": nn.Parameter(torch.empty(out_features)) if bias else None}

    def slots(self, layer: Linear, start: int, stop: int) -> Slots:
        yield "weight", WeightSlot("weight", start, stop, layer.split)
        if layer.bias is not None:
            yield "bias", WeightSlot("bias", start, stop, layer.split if layer.split.dim == 0 else WHOLE)

    def product(self, layer: Linear, *, deterministic: bool, shared: bool) -> Product:
        product = chosen(layer.weight, layer.bias is not None, deterministic=deterministic)
        if isinstance(product, PackedProduct) and not shared:
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
        return product


DENSE = DenseFormat()


class Linear(ModelPart):
    """y = x W^T + b over rows: [N, in] -> [N, out]. The weight is stored [out, in], as checkpoints have it."""

    keeps_bits: ClassVar[bool] = True  # or its format has no product, and it is refused
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        bias: bool = False,
        *,
        weight_format: WeightFormat = DENSE,
        split: Split = WHOLE,
    ) -> None:
        """out_features: of several matrices by what a checkpoint calls them, from the first output feature on. split:
        what of each matrix is here; sizes are those of the whole. Raises ValueError if a size has no such share.

        Of shares by columns the products add up to the whole's, so the bias is the first's alone.
        """
        super().__init__()
        self.format, self.split = weight_format, split
        outs = {"": out_features} if isinstance(out_features, int) else out_features
        self._outs = {f"{name}." if name else "": split.share(0, size) for name, size in outs.items()}
        bias = bias and (split.dim == 0 or split.rank == 0)
        tensors = weight_format.parameters(split.share(1, in_features), sum(self._outs.values()), bias)
        for name, tensor in tensors.items():
            self.register_parameter(name, tensor)
        self._names = tuple(tensors)
        self.product: Product = weight_format.plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self._parameters  # past nn.Module's search for an attribute, which takes as long as a small launch
        return self.product(x, *[own[name] for name in self._names])

    def gated(self, x: torch.Tensor, ops: Ops, activation: str) -> torch.Tensor:
        """`ops.gate` of the product, [N, out / 2]: one kernel where there is one."""
        if isinstance(self.product, InOrderProduct) and self.product.is_ours(x, gated=True):
            return self.product(x, self.weight, self.bias, activation)
        return ops.gate(self(x), activation)

    def slots(self, theirs: str = "") -> Slots:
        stop = 0
        for matrix, size in self._outs.items():
            start, stop = stop, stop + size
            for name, slot in self.format.slots(self, start, stop):
                yield theirs + matrix + name, slot

    def kept(self) -> list[nn.Parameter]:
        """The parameters whose dtype the format says."""
        return [self.get_parameter(name) for name in self.format.kept]


def set_products(model: nn.Module, *, deterministic: bool) -> None:
    """Choose each Linear's product for serving, by format, device, dtype and whether equal bits are promised.

    Raises ValueError naming what cannot promise them: a format, or a module that computes and does not say that it
    keeps them (ModelPart.keeps_bits).
    """
    read = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            shared = id(module.weight) in read
            product = module.format.product(module, deterministic=deterministic, shared=shared)
            if product is None:
                raise _no_promise(name, module.format)
            module.product = product
        elif deterministic and _computes(module) and not _keeps_bits(module):
            raise _no_promise(name, module)


def _computes(module: nn.Module) -> bool:
    """Not a mere container of others."""
    return type(module).forward is not nn.Module.forward or any(True for _ in module.parameters(recurse=False))


def _keeps_bits(module: nn.Module) -> bool:
    return module.keeps_bits if isinstance(module, ModelPart) else isinstance(module, nn.Embedding)


def _no_promise(name: str, of: object) -> ValueError:
    """What to raise of a module `name`, because of it or of its format."""
    kind = type(of).__name__
    return ValueError(
        f"{name or 'the model'} ({kind}) does not promise that a row's bits are the same whatever runs beside it; "
        "set deterministic=False"
    )
