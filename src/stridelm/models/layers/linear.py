"""The linear layer: one or more of a checkpoint's matrices, stacked, in some weight format, whole or one share of
several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.kernels.ops import Ops, Parts
from stridelm.kernels.row_forms import RowForm, Rows
from stridelm.models.layers.expert_products import ExpertProducts, ExpertsInTurn, StoredExperts, chosen_experts
from stridelm.models.layers.products import PackedProduct, Product, chosen
from stridelm.models.layers.slots import WHOLE, ModelPart, Slots, Split, WeightSlot


@dataclass(frozen=True)
class Stack:
    """Matrices that are applied to the same rows, one below the other, or a share of each. Sizes are the share's."""

    in_features: int
    outs: tuple[int, ...]
    """Output features of each matrix."""
    bias: bool = False
    split: Split = WHOLE

    @property
    def out_features(self) -> int:
        return sum(self.outs)

    @cached_property
    def unit(self) -> int:
        """The largest number that divides where each matrix begins; 0 if there is but one."""
        return gcd(*self.outs[:-1])


class WeightFormat(Protocol):
    """How matrices are stored and multiplied. One object serves any number of layers."""

    name: str
    """For descriptions of a checkpoint."""
    replaceable: ClassVar[bool]
    """Whether a layer that was built in this format may be given another (`store_as`)."""
    kept: frozenset[str]
    """Parameters that stay in the dtype in which they are created; others take the model's."""

    def parameters(self, stack: Stack) -> Mapping[str, nn.Parameter | None]:
        """A stack's parameters by name, in the order in which products take them: first "weight", and last "bias",
        which is None if the stack has none. Raises ValueError for shares that this format cannot have."""
        ...

    def slots(self, stack: Stack, start: int, stop: int) -> Slots:
        """The checkpoint tensors of one matrix, whose output features are `start` to `stop` of the stack's: each with
        its name after the matrix's prefix and its slot, which has the stack's split if that cuts the tensor."""
        ...

    def check(self, device: torch.device) -> None:
        """Raise ValueError if the device cannot multiply by such weights."""
        ...

    @property
    def plain(self) -> Product:
        """The product used until one is chosen: it runs on any device, and can be trained if the format can."""
        ...

    def product(self, layer: Linear, *, deterministic: bool, shared: bool) -> Product | None:
        """The product for serving on the layer's device and dtype; None if `deterministic` and the format has none that
        keeps equal bits. It may replace the layer's weight by its own copy, unless another module shares the weight."""
        ...

    def plain_experts(self, layer: StoredExperts) -> ExpertProducts:
        """As `plain`, for a mixture's experts."""
        ...

    def experts(self, layer: StoredExperts, *, deterministic: bool) -> ExpertProducts:
        """As `product`, for a mixture's experts."""
        ...


class DenseFormat:
    """Weights stored in the dtype in which they are multiplied."""

    name = "dense"
    replaceable: ClassVar[bool] = True
    kept: frozenset[str] = frozenset()

    @property
    def plain(self) -> Product:
        return F.linear

    def parameters(self, stack: Stack) -> Mapping[str, nn.Parameter | None]:
        return {"weight": nn.Parameter(torch.empty(stack.out_features, stack.in_features)), "bias": bias_of(stack)}

    def slots(self, stack: Stack, start: int, stop: int) -> Slots:
        yield "weight", WeightSlot("weight", start, stop, stack.split)
        yield from bias_slots(stack, start, stop)

    def check(self, device: torch.device) -> None:
        pass

    def product(self, layer: Linear, *, deterministic: bool, shared: bool) -> Product:
        product = chosen(layer.weight, layer.bias is not None, deterministic=deterministic)
        if isinstance(product, PackedProduct) and not shared:
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
        return product

    def plain_experts(self, layer: StoredExperts) -> ExpertProducts:
        return ExpertsInTurn()

    def experts(self, layer: StoredExperts, *, deterministic: bool) -> ExpertProducts:
        return chosen_experts(layer.gate_up, layer.down, layer.count, deterministic=deterministic)


DENSE = DenseFormat()


def bias_of(stack: Stack) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(stack.out_features)) if stack.bias else None


def bias_slots(stack: Stack, start: int, stop: int) -> Slots:
    """The slot of a matrix's bias, if there is one."""
    if stack.bias:
        yield "bias", WeightSlot("bias", start, stop, stack.split if stack.split.dim == 0 else WHOLE)


class Storable(ModelPart):
    """A module whose matrices are stored in a weight format. All parameters of its own belong to that format."""

    format: WeightFormat

    def store_as(self, weight_format: WeightFormat) -> None:
        """Take another format, before weights are loaded. Raises ValueError for shares that it cannot have."""
        assert self.format.replaceable
        device = next(self.parameters()).device
        for name in list(self._parameters):
            delattr(self, name)
        with device:
            self._take(weight_format)

    def _take(self, weight_format: WeightFormat) -> None:
        """Make the format's parameters."""
        raise NotImplementedError


class Linear(Storable):
    """y = x W^T + b over rows: [N, in] -> [N, out]. The weight is stored [out, in], as in checkpoints."""

    keeps_bits: ClassVar[bool] = True  # if its format has no product that does, set_products refuses it
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
        """out_features: for several matrices, a mapping from checkpoint names to sizes, in order of output features.
        split: the share of each matrix that this layer holds; sizes are those of the whole. Raises ValueError if a size
        cannot be divided into such shares.

        Products of shares by columns are summed, so only the first share has the bias.
        """
        super().__init__()
        outs = {"": out_features} if isinstance(out_features, int) else out_features
        self._outs = {f"{name}." if name else "": split.share(0, size) for name, size in outs.items()}
        bias = bias and (split.dim == 0 or split.rank == 0)
        self.stack = Stack(split.share(1, in_features), tuple(self._outs.values()), bias, split)
        self._take(weight_format)

    def _take(self, weight_format: WeightFormat) -> None:
        tensors = weight_format.parameters(self.stack)
        for name, tensor in tensors.items():
            self.register_parameter(name, tensor)
        self.format, self._names = weight_format, tuple(tensors)
        self.product: Product = weight_format.plain

    @property
    def row_form(self) -> RowForm | None:
        return getattr(self.product, "row_form", None)

    def forward(self, x: Rows) -> torch.Tensor:
        own = self._parameters  # skips nn.Module's attribute lookup, which takes as long as a small launch
        return self.product(x, *[own[name] for name in self._names])

    def parts(self, x: Rows) -> torch.Tensor | Parts:
        """The product, or Parts whose sum it is, if that is faster for whoever adds it to the stream."""
        in_parts = getattr(self.product, "parts", None)
        own = self._parameters
        found = None if in_parts is None else in_parts(x, *[own[name] for name in self._names])
        return self(x) if found is None else found

    def gated(self, x: Rows, ops: Ops, activation: str, up: torch.Tensor | None = None) -> torch.Tensor:
        """`ops.gate` of the product, [N, out / 2], or [N, out] if `up` is given, fused into one kernel if there is
        one."""
        fuses_gate = getattr(self.product, "fuses_gate", None)
        if fuses_gate is None or not fuses_gate(x, up is not None):
            return ops.gate(self(x), activation, up)
        own = self._parameters
        given = () if up is None else (up,)
        return self.product(x, *[own[name] for name in self._names], activation, *given)

    def gated_rows(self, x: Rows, ops: Ops, activation: str, form: RowForm | None) -> Rows:
        """What `gated` returns, quantised if a product that takes rows of this form reads it and a kernel can."""
        fuses_gate = getattr(self.product, "fuses_gate", None)
        if form is None:
            return self.gated(x, ops, activation)
        if fuses_gate is None or not fuses_gate(x, False):
            return ops.gate_quantised(self(x), activation, form)
        fused = getattr(self.product, "gated_rows", None)
        if fused is None:
            return self.gated(x, ops, activation)
        own = self._parameters
        made: Rows = fused(x, *[own[name] for name in self._names], activation, form)
        return made

    def slots(self, theirs: str = "") -> Slots:
        stop = 0
        for matrix, size in self._outs.items():
            start, stop = stop, stop + size
            for name, slot in self.format.slots(self.stack, start, stop):
                yield theirs + matrix + name, slot

    def kept(self) -> list[nn.Parameter]:
        return [self.get_parameter(name) for name in self.format.kept]


@runtime_checkable
class ChoosesProducts(Protocol):
    """A module other than a Linear that multiplies by weights."""

    def choose_products(self, *, deterministic: bool) -> None:
        """Choose products for serving, which keep equal bits if `deterministic`."""
        ...


def set_products(model: nn.Module, *, deterministic: bool) -> None:
    """Choose the products for serving, by format, device, dtype and whether equal bits are promised.

    Raises ValueError naming what cannot guarantee them: a format, or a module that computes and does not declare that
    it keeps them (ModelPart.keeps_bits).
    """
    read = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            shared = id(module.weight) in read
            product = module.format.product(module, deterministic=deterministic, shared=shared)
            if product is None:
                raise _no_promise(name, module.format)
            module.product = product
        elif isinstance(module, ChoosesProducts):
            module.choose_products(deterministic=deterministic)
        elif deterministic and _computes(module) and not _keeps_bits(module):
            raise _no_promise(name, module)


def _computes(module: nn.Module) -> bool:
    """Whether the module is more than a container of others."""
    return type(module).forward is not nn.Module.forward or any(True for _ in module.parameters(recurse=False))


def _keeps_bits(module: nn.Module) -> bool:
    return module.keeps_bits if isinstance(module, ModelPart) else isinstance(module, nn.Embedding)


def _no_promise(name: str, of: object) -> ValueError:
    """The error for the module `name`; `of` is the module itself or its format."""
    kind = type(of).__name__
    return ValueError(
        f"{name or 'the model'} ({kind}) does not promise that a row's bits are the same whatever runs beside it; "
        "set deterministic=False"
    )
