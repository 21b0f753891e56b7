"""Row operations whose results are quantised, from those whose results are not, in torch: the reference for the fused
ones, and what a set of operations has that fuses none."""

from __future__ import annotations

import torch

from stridelm.kernels.ops import Ops, Parts
from stridelm.kernels.plain_fp8 import quantise
from stridelm.kernels.row_forms import QuantisedRows, RowForm


class QuantisesAfterwards:
    """`Ops.norm_quantised` and `Ops.gate_quantised` of a class that has the other operations."""

    def norm_quantised(
        self: Ops,
        x_NC: torch.Tensor,
        weight_C: torch.Tensor,
        eps: float,
        form: RowForm,
        delta: torch.Tensor | Parts | None = None,
    ) -> tuple[torch.Tensor, QuantisedRows]:
        if delta is None:
            return x_NC, quantise(self.norm(x_NC, weight_C, eps), form)
        if isinstance(delta, Parts):
            total_NC, normed_NC = self.combine_norm(delta, x_NC, weight_C, eps)
        else:
            total_NC, normed_NC = self.add_norm(delta, x_NC, weight_C, eps)
        return total_NC, quantise(normed_NC, form)

    def gate_quantised(self: Ops, gate_up_N2I: torch.Tensor, activation: str, form: RowForm) -> QuantisedRows:
        return quantise(self.gate(gate_up_N2I, activation), form)
