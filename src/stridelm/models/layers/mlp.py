"""The gated MLP (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.kernels.ops import ACTIVATIONS, Ops, Parts
from stridelm.kernels.row_forms import RowForm, Rows
from stridelm.models.layers.block import Site, check_sizes
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.slots import ModelPart, Slots, Split


@dataclass(frozen=True, kw_only=True)
class GatedMLPSpec:
    """Raises ValueError for an impossible width."""

    reads_stream: ClassVar[bool] = False
    name: str = "mlp"
    intermediate_size: int
    bias: bool = False
    activation: str = "silu"
    """The gate's activation, one of kernels.ops.ACTIVATIONS."""

    def __post_init__(self) -> None:
        check_sizes(intermediate_size=self.intermediate_size)
        assert self.activation in ACTIVATIONS

    @property
    def needs(self) -> Mapping[str, Any]:
        return {"activation": self.activation}

    def build(self, site: Site) -> GatedMLP:
        return GatedMLP(self, site)


class GatedMLP(ModelPart):
    """down(activation(gate x) * up x); gate and up are one product."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: GatedMLPSpec, site: Site) -> None:
        super().__init__()
        self.activation, self.shard = spec.activation, site.shard
        width, inner, stored = site.width, spec.intermediate_size, site.weight_format
        rows, columns = Split.rows(site.shard), Split.columns(site.shard)
        outs = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = Linear(width, outs, bias=spec.bias, weight_format=stored, split=rows)
        self.down = Linear(inner, {"down_proj": width}, bias=spec.bias, weight_format=stored, split=columns)

    @property
    def row_form(self) -> RowForm | None:
        return self.gate_up.row_form

    def forward(self, x: Rows, ops: Ops) -> torch.Tensor:
        return self.shard.sum(self.share(x, ops))

    def parts(self, x: Rows, ops: Ops) -> torch.Tensor | Parts:
        """The same, or its Parts."""
        return self.down.parts(self._inner_rows(x, ops))

    def share(self, x: Rows, ops: Ops) -> torch.Tensor:
        """This rank's summand."""
        return self.down(self._inner_rows(x, ops))

    def _inner_rows(self, x: Rows, ops: Ops) -> Rows:
        return self.gate_up.gated_rows(x, ops, self.activation, self.down.row_form)

    def fill_up(self, multiple: int) -> None:
        """Give it further inner features, up to a multiple of so many, of dense weights: zeros, which add nothing."""
        more = -self.down.weight.shape[1] % multiple
        if not more:
            return
        for name in ("weight", "bias"):
            halves = getattr(self.gate_up, name)
            if halves is not None:
                filled = [F.pad(half, (*(0, 0) * (half.dim() - 1), 0, more)) for half in halves.chunk(2)]
                setattr(self.gate_up, name, nn.Parameter(torch.cat(filled), requires_grad=False))
        self.down.weight = nn.Parameter(F.pad(self.down.weight, (0, more)), requires_grad=False)

    def slots(self, theirs: str = "") -> Slots:
        yield from self._inner("gate_up", theirs)
        yield from self._inner("down", theirs)
