"""An MLP and a mixture of experts beside one another: both read the stream, each after a norm of its own, and what they
yield is normalised once more, each by itself, and added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from stridelm.kernels.ops import Ops, Routing
from stridelm.models.layers.block import Site
from stridelm.models.layers.experts import Experts, MixtureSpec
from stridelm.models.layers.mlp import GatedMLPSpec
from stridelm.models.layers.router import NormedRouter
from stridelm.models.layers.slots import ModelPart, Slots


@dataclass(frozen=True, kw_only=True)
class ParallelMLPsSpec:
    name: ClassVar[str] = "mlp"
    reads_stream: ClassVar[bool] = True
    mlp: GatedMLPSpec
    mixture: MixtureSpec
    """Its router normalises and scales. No expert is shared, there is no correction bias, and the activation is the
    MLP's."""

    def __post_init__(self) -> None:
        assert self.mixture.shared is None and not self.mixture.correction_bias
        assert self.mixture.activation == self.mlp.activation

    @property
    def intermediate_size(self) -> int:
        return self.mlp.intermediate_size

    @property
    def moe_intermediate_size(self) -> int:
        return self.mixture.moe_intermediate_size

    @property
    def routing(self) -> Routing:
        return self.mixture.routing

    @property
    def needs(self) -> Mapping[str, Any]:
        return self.mixture.needs

    def build(self, site: Site) -> ParallelMLPs:
        return ParallelMLPs(self, site)


class ParallelMLPs(ModelPart):
    """The norm before the MLP is the block's."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: ParallelMLPsSpec, site: Site) -> None:
        super().__init__()
        self.spec, self.shard, self.eps = spec, site.shard, site.eps
        self.mlp = spec.mlp.build(site)
        self.router = NormedRouter(site.width, spec.mixture.routing, site.eps)
        self.experts = Experts(spec.mixture, site)
        self.after_mlp, self.before_experts, self.after_experts = (
            nn.Parameter(torch.empty(site.width)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, ops: Ops, stream_NH: torch.Tensor) -> torch.Tensor:
        """x: the MLP's input. stream: what router and experts read, after norms of their own."""
        chosen_NK, weights_NK = self.router(stream_NH, ops)
        normed_NH = ops.norm(stream_NH, self.before_experts, self.eps)
        parts_NKH, dense_NH = self.experts.with_shared(normed_NH, chosen_NK, self.mlp, x, ops)
        mixed_NH = self.shard.sum(ops.combine(parts_NKH, weights_NK))
        dense_NH = ops.norm(self.shard.sum(dense_NH), self.after_mlp, self.eps)
        return ops.add_normed(dense_NH, mixed_NH, self.after_experts, self.eps)[0]

    def slots(self, theirs: str = "") -> Slots:
        block = theirs.removesuffix(f"{self.spec.name}.")  # only the MLP has a name of its own there
        yield from self._inner("mlp", theirs)
        yield from self._inner("router", block + "router.")
        yield from self._inner("experts", block + "experts.")
        yield from self._own("after_mlp", block + "post_feedforward_layernorm_1.weight")
        yield from self._own("before_experts", block + "pre_feedforward_layernorm_2.weight")
        yield from self._own("after_experts", block + "post_feedforward_layernorm_2.weight")
