"""A mixture of experts in the place of an MLP: each row is processed by the gated MLPs that it chooses (Shazeer et al.
2017, arXiv 1701.06538), and by one that all rows share if the model has it (Dai et al. 2024, arXiv 2401.06066)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from stridelm.kernels.ops import ACTIVATIONS, Ops, Parts, Routing
from stridelm.kernels.row_forms import RowForm, Rows, dense_of
from stridelm.models.layers.block import Site, check_sizes
from stridelm.models.layers.expert_products import ExpertProducts, ExpertsInput, GroupedExperts
from stridelm.models.layers.linear import Linear, Stack, Storable, WeightFormat
from stridelm.models.layers.mlp import GatedMLP, GatedMLPSpec
from stridelm.models.layers.products import InOrderProduct
from stridelm.models.layers.router import Router
from stridelm.models.layers.slots import ModelPart, Slots, Split, WeightSlot


@dataclass(frozen=True, kw_only=True)
class MixtureSpec:
    """Raises ValueError for an impossible width."""

    reads_stream: ClassVar[bool] = False
    name: str = "mlp"
    moe_intermediate_size: int
    """Width of an expert."""
    routing: Routing
    correction_bias: bool = False
    """Whether a bias is added to the scores for the choice."""
    shared: GatedMLPSpec | None = None
    """The MLP of all rows; its name is within the mixture."""
    shared_gate: str | None = None
    """Name in checkpoints of what scales the shared MLP's result, by the sigmoid of its product with the row."""
    activation: str = "silu"
    """The gates' activation, one of kernels.ops.ACTIVATIONS."""
    stacked: bool = False
    """Whether checkpoints have one tensor for all experts' gates and ups, and one for their downs."""

    def __post_init__(self) -> None:
        check_sizes(moe_intermediate_size=self.moe_intermediate_size)
        assert self.activation in ACTIVATIONS
        assert self.shared is not None or self.shared_gate is None
        assert self.shared is None or self.shared.activation == self.activation

    @property
    def needs(self) -> Mapping[str, Any]:
        return {"activation": self.activation, "has_experts": True}

    def build(self, site: Site) -> Mixture:
        return Mixture(self, site)


class Mixture(ModelPart):
    """The weighted sum of the chosen experts' results, and the shared one's."""

    keeps_bits: ClassVar[bool] = True
    reads_dense: ClassVar[bool] = True  # the router does

    def __init__(self, spec: MixtureSpec, site: Site) -> None:
        super().__init__()
        self.spec, self.shard = spec, site.shard
        self.router = Router(site.width, spec.routing, bias=spec.correction_bias, shared_gate=spec.shared_gate)
        self.experts = Experts(spec, site)
        self.shared = None if spec.shared is None else spec.shared.build(site)

    @property
    def row_form(self) -> RowForm | None:
        return self.experts.row_form

    def forward(self, x: Rows, ops: Ops) -> torch.Tensor:
        return self.shard.sum(ops.combine(*self.parts(x, ops)))

    def parts(self, x: Rows, ops: Ops) -> Parts:
        """The same before it is summed."""
        chosen_NK, weights_NW = self.router(dense_of(x), ops)
        if self.shared is None:
            return Parts(self.experts(x, chosen_NK, ops), weights_NW)
        shared_x = x if self.shared.row_form is self.row_form else dense_of(x)
        parts_NKH, shared_NH = self.experts.with_shared(x, chosen_NK, self.shared, shared_x, ops)
        return Parts(parts_NKH, weights_NW, shared_NH)

    def slots(self, theirs: str = "") -> Slots:
        yield from self._inner("router", theirs)
        yield from self._inner("experts", theirs + "experts.")
        if self.spec.shared is not None:
            yield from self._inner("shared", f"{theirs}{self.spec.shared.name}.")


class Experts(Storable):
    """The experts' matrices, one below the other: gate and up of the first expert, of the second, and so on."""

    keeps_bits: ClassVar[bool] = True  # set_products chooses products that do

    def __init__(self, spec: MixtureSpec, site: Site) -> None:
        super().__init__()
        self.count, self.activation, self.stacked = spec.routing.num_experts, spec.activation, spec.stacked
        rows, columns = Split.rows(site.shard), Split.columns(site.shard)
        self.width, self.inner = site.width, rows.share(0, spec.moe_intermediate_size)
        self.stacks = {
            "gate_up": Stack(self.width, (self.inner,) * 2 * self.count, split=rows),
            "down": Stack(self.inner, (self.width,) * self.count, split=columns),
        }
        self._take(site.weight_format)

    gate_up: nn.Parameter
    down: nn.Parameter

    def _take(self, weight_format: WeightFormat) -> None:
        """Parameters are called after their stack, and what comes beside a weight as in the format."""
        self._kept: list[str] = []
        for name, stack in self.stacks.items():
            for part, tensor in weight_format.parameters(stack).items():
                if tensor is not None:
                    self.register_parameter(_named(name, part), tensor)
                    self._kept += [_named(name, part)] if part in weight_format.kept else []
        self.format = weight_format
        self.products: ExpertProducts = weight_format.plain_experts(self)

    @property
    def row_form(self) -> RowForm | None:
        return getattr(self.products, "row_form", None)

    def forward(self, x: Rows, chosen_NK: torch.Tensor, ops: Ops) -> torch.Tensor:
        """[N, K, width]: what each chosen expert makes of the row, as far as this rank has its matrices."""
        return self.products(ExpertsInput(x, chosen_NK, self.gate_up, self.down, self.activation), ops)

    def with_shared(
        self, x: Rows, chosen_NK: torch.Tensor, shared: GatedMLP, shared_x: Rows, ops: Ops
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and this rank's summand of what an MLP of the same activation makes of `shared_x`, [N, width]: in
        the same launches, if both have kernels that add alike."""
        products, ours = self.products, (shared.gate_up, shared.down)
        if (
            isinstance(products, GroupedExperts)
            and products.takes_shared(x.shape[0])
            and all(map(_adds_in_order, ours))
        ):
            inputs = ExpertsInput(x, chosen_NK, self.gate_up, self.down, self.activation)
            return products.with_shared(inputs, dense_of(shared_x), shared.gate_up.weight, shared.down.weight)
        return self(x, chosen_NK, ops), shared.share(shared_x, ops)

    def choose_products(self, *, deterministic: bool) -> None:
        """Choose the products for serving, by device, dtype and whether equal bits are promised. They may keep the
        weights in a form of their own; the parameters are empty then."""
        self.products = self.format.experts(self, deterministic=deterministic)
        if self.products.packs:
            for name in ("gate_up", "down"):
                empty = self.get_parameter(name).new_empty(0)
                setattr(self, name, nn.Parameter(empty, requires_grad=False))

    def kept(self) -> list[nn.Parameter]:
        return [self.get_parameter(name) for name in self._kept]

    def slots(self, theirs: str = "") -> Slots:
        if self.stacked:
            for name, parts in (("gate_up", 2 * self.count), ("down", self.count)):
                rows, split = self.get_parameter(name).shape[0], self.stacks[name].split
                yield f"{theirs}{name}_proj", WeightSlot(name, 0, rows, split, stacked=self.count, parts=parts)
            return
        for expert in range(self.count):
            at = 2 * expert * self.inner
            yield from self._matrix(f"{theirs}{expert}.gate_proj.", "gate_up", at, self.inner)
            yield from self._matrix(f"{theirs}{expert}.up_proj.", "gate_up", at + self.inner, self.inner)
            yield from self._matrix(f"{theirs}{expert}.down_proj.", "down", expert * self.width, self.width)

    def _matrix(self, theirs: str, name: str, start: int, size: int) -> Slots:
        for stored, slot in self.format.slots(self.stacks[name], start, start + size):
            yield theirs + stored, replace(slot, name=_named(name, slot.name))


def _adds_in_order(layer: Linear) -> bool:
    return isinstance(layer.product, InOrderProduct) and layer.bias is None


def _named(stack: str, part: str) -> str:
    return stack + part.removeprefix("weight")
