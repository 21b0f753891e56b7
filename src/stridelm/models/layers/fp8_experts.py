"""Products with the matrices of experts in eight bits, in the ways of expert_products.py."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from stridelm.kernels.ops import Ops
from stridelm.kernels.plain_fp8 import form_of, plain_product
from stridelm.kernels.row_forms import RowForm
from stridelm.models.layers.expert_products import (
    ExpertProducts,
    ExpertsInput,
    StoredExperts,
    in_turn,
    of_every_expert,
)
from stridelm.models.layers.products import Product, tiled_product


class FP8Experts:
    """One expert after another; on a GPU all rows through each, since what was chosen is not known on the host.

    The weights and scales are read from the layer, whose tensors are replaced when it is loaded.
    """

    packs: ClassVar[bool] = False

    def __init__(self, layer: StoredExperts, by: Product, powers: bool) -> None:
        """powers: whether scales are powers of two."""
        self.layer, self.by, self.powers = layer, by, powers

    def tensors(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Weights and scales of gate above up, and of down."""
        layer, scale = self.layer, self.layer.get_parameter
        return (layer.gate_up, scale("gate_up_scale")), (layer.down, scale("down_scale"))

    def __call__(self, inputs: ExpertsInput, ops: Ops) -> torch.Tensor:
        experts = self.layer.count
        gate_ups, downs = (list(zip(weight.chunk(experts), scale.chunk(experts))) for weight, scale in self.tensors())

        def run(expert: int, x: torch.Tensor) -> torch.Tensor:
            inner = ops.gate(plain_product(x, *gate_ups[expert], None, self.by, self.powers), inputs.activation)
            return plain_product(inner, *downs[expert], None, self.by, self.powers)

        return (of_every_expert if inputs.x_NH.is_cuda else in_turn)(inputs, experts, run)


class GroupedFP8Experts(FP8Experts):
    """All experts in a few launches (kernels/fp8_experts.py)."""

    @property
    def row_form(self) -> RowForm:
        return form_of(self.layer.get_parameter("gate_up_scale"), self.powers)

    def __call__(self, inputs: ExpertsInput, ops: Ops) -> torch.Tensor:
        from stridelm.kernels.fp8_experts import expert_parts
        from stridelm.kernels.quantise import quantised

        if inputs.x_NH.dtype == torch.float64:
            return super().__call__(inputs, ops)
        between = form_of(self.layer.get_parameter("down_scale"), self.powers)
        x = quantised(inputs.x, self.row_form)
        return expert_parts(x, inputs.chosen_NK, *self.tensors(), inputs.activation, between)


def chosen_fp8_experts(layer: StoredExperts, *, deterministic: bool, powers: bool) -> ExpertProducts:
    """The fastest for the weights' device; if equal bits are promised, among those that keep them."""
    if layer.gate_up.is_cuda:
        from stridelm.kernels.fp8 import can_multiply

        if all(can_multiply(weight, torch.bfloat16) for weight in (layer.gate_up, layer.down)):
            return GroupedFP8Experts(layer, tiled_product, powers)
    return FP8Experts(layer, tiled_product if deterministic else F.linear, powers)
