"""The router of a mixture of experts: a score for each expert, from which each row chooses some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from stridelm.kernels.ops import Ops, Routing
from stridelm.models.layers.linear import DenseFormat, Linear
from stridelm.models.layers.products import Product, chosen_wide, wide_product
from stridelm.models.layers.slots import ModelPart, Slots


class WideFormat(DenseFormat):
    """Dense weights whose products are returned as they are summed, in float32 (float64 for float64): rounded to 16
    bits, scores of different experts would become equal."""

    replaceable: ClassVar[bool] = False

    @property
    def plain(self) -> Product:
        return wide_product

    def product(self, layer: Linear, *, deterministic: bool, shared: bool) -> Product:
        assert not shared
        if layer.weight.device.type == "cpu" and layer.weight.itemsize == 2:  # a CPU would widen it in every product
            layer.weight = nn.Parameter(layer.weight.float(), requires_grad=False)
        return chosen_wide(layer.weight, deterministic=deterministic)


WIDE = WideFormat()


class Router(ModelPart):
    """Every rank chooses for itself, by the same arithmetic."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, width: int, routing: Routing, *, bias: bool = False, shared_gate: str | None = None) -> None:
        """bias: a correction of the scores, for the choice only. shared_gate: name in checkpoints of what scores the
        shared expert."""
        super().__init__()
        self.routing = routing
        outs: Mapping[str, int] = {"gate": routing.num_experts, **({shared_gate: 1} if shared_gate else {})}
        self.scores = Linear(width, outs, weight_format=WIDE)
        self.bias = nn.Parameter(torch.empty(routing.num_experts, dtype=torch.float32)) if bias else None

    def forward(self, x: torch.Tensor, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, width] -> (experts, weights), as `Ops.route` returns them."""
        return ops.route(self.scores(x), self.routing, self.bias)

    def kept(self) -> list[nn.Parameter]:
        return [] if self.bias is None else [self.bias]

    def slots(self, theirs: str = "") -> Slots:
        yield from self._inner("scores", theirs)
        if self.bias is not None:
            yield from self._own("bias", theirs + "gate.e_score_correction_bias")


class NormedRouter(ModelPart):
    """Scores a norm of the row, divided by the square root of its width, and multiplies each expert's weight by a
    number of the expert's own."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, width: int, routing: Routing, eps: float) -> None:
        super().__init__()
        self.routing, self.eps = replace(routing, logit_scale=width**-0.5), eps
        self.norm = nn.Parameter(torch.empty(width))
        self.scores = Linear(width, {"proj": routing.num_experts}, weight_format=WIDE)
        self.expert_scale = nn.Parameter(torch.empty(routing.num_experts))

    def forward(self, x: torch.Tensor, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, width] -> (experts, weights), as `Ops.route` returns them."""
        logits = self.scores(ops.norm(x, self.norm, self.eps))
        return ops.route(logits, self.routing, scale_E=self.expert_scale)

    def slots(self, theirs: str = "") -> Slots:
        yield from self._inner("scores", theirs)
        yield from self._own("norm", theirs + "scale")
        yield from self._own("expert_scale", theirs + "per_expert_scale")
