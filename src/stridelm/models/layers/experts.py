"""A mixture of experts in the place of an MLP: each row is processed by the gated MLPs that it chooses (Shazeer et al.
2017, arXiv 1701.06538), and by one that all rows share if the model has it (Dai et al. 2024, arXiv 2401.06066)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from stridelm.kernels.ops import ACTIVATIONS, Ops, Routing
from stridelm.models.layers.block import Site, check_sizes
from stridelm.models.layers.expert_products import ExpertProducts, ExpertsInput, ExpertsInTurn, chosen_experts
from stridelm.models.layers.mlp import GatedMLPSpec
from stridelm.models.layers.router import Router
from stridelm.models.layers.slots import ModelPart, Slots, Split, WeightSlot


@dataclass(frozen=True, kw_only=True)
class MixtureSpec:
    """Raises ValueError for an impossible width."""

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

    def __post_init__(self) -> None:
        check_sizes(moe_intermediate_size=self.moe_intermediate_size)
        assert self.activation in ACTIVATIONS
        assert self.shared is not None or self.shared_gate is None

    @property
    def needs(self) -> Mapping[str, Any]:
        return {"activation": self.activation, "has_experts": True}

    def build(self, site: Site) -> Mixture:
        return Mixture(self, site)


class Mixture(ModelPart):
    """The weighted sum of the chosen experts' results, and the shared one's."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: MixtureSpec, site: Site) -> None:
        super().__init__()
        self.spec, self.shard = spec, site.shard
        self.router = Router(site.width, spec.routing, bias=spec.correction_bias, shared_gate=spec.shared_gate)
        self.experts = Experts(spec, site)
        self.shared = None if spec.shared is None else spec.shared.build(site)

    def forward(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        chosen_NK, weights_NW = self.router(x, ops)
        shared = None if self.shared is None else self.shared.share(x, ops)
        return self.shard.sum(ops.combine(self.experts(x, chosen_NK, ops), weights_NW, shared))

    def slots(self, theirs: str = "") -> Slots:
        yield from self._inner("router", theirs)
        yield from self._inner("experts", theirs + "experts.")
        if self.spec.shared is not None:
            yield from self._inner("shared", f"{theirs}{self.spec.shared.name}.")


class Experts(ModelPart):
    """The experts' matrices, one below the other: gate and up of the first expert, of the second, and so on."""

    keeps_bits: ClassVar[bool] = True  # set_products chooses products that do

    def __init__(self, spec: MixtureSpec, site: Site) -> None:
        super().__init__()
        self.count, self.activation = spec.routing.num_experts, spec.activation
        self.rows, self.columns = Split.rows(site.shard), Split.columns(site.shard)
        self.width, self.inner = site.width, self.rows.share(0, spec.moe_intermediate_size)
        self.gate_up = nn.Parameter(torch.empty(self.count * 2 * self.inner, self.width))
        self.down = nn.Parameter(torch.empty(self.count * self.width, self.inner))
        self.products: ExpertProducts = ExpertsInTurn()

    def forward(self, x: torch.Tensor, chosen_NK: torch.Tensor, ops: Ops) -> torch.Tensor:
        """[N, K, width]: what each chosen expert makes of the row, as far as this rank has its matrices."""
        return self.products(ExpertsInput(x, chosen_NK, self.gate_up, self.down, self.activation), ops)

    def choose_products(self, *, deterministic: bool) -> None:
        """Choose the products for serving, by device, dtype and whether equal bits are promised. They may keep the
        weights in a form of their own; the parameters are empty then."""
        self.products = chosen_experts(self.gate_up, self.down, self.count, deterministic=deterministic)
        if self.products.packs:
            for name in ("gate_up", "down"):
                empty = self.get_parameter(name).new_empty(0)
                setattr(self, name, nn.Parameter(empty, requires_grad=False))

    def slots(self, theirs: str = "") -> Slots:
        for expert in range(self.count):
            prefix, at = f"{theirs}{expert}.", 2 * expert * self.inner
            yield f"{prefix}gate_proj.weight", WeightSlot("gate_up", at, at + self.inner, self.rows)
            yield f"{prefix}up_proj.weight", WeightSlot("gate_up", at + self.inner, at + 2 * self.inner, self.rows)
            at = expert * self.width
            yield f"{prefix}down_proj.weight", WeightSlot("down", at, at + self.width, self.columns)
