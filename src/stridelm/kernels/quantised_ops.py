"""Row operations whose results are quantised, from those whose results are not, in torch: the reference for the fused
ones, and what a set of operations has that fuses none."""

from __future__ import annotations

from dataclasses import replace

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
        *,
        keeps_dense: bool = False,
    ) -> tuple[torch.Tensor, QuantisedRows]:
        if delta is None:
            total_NC, normed_NC = x_NC, self.norm(x_NC, weight_C, eps)
        elif isinstance(delta, Parts):
            total_NC, normed_NC = self.combine_norm(delta, x_NC, weight_C, eps)
        else:
            total_NC, normed_NC = self.add_norm(delta, x_NC, weight_C, eps)
        quantised = quantise(normed_NC, form)
        return total_NC, replace(quantised, dense_NI=normed_NC) if keeps_dense else quantised

    def gate_quantised(self: Ops, gate_up_N2I: torch.Tensor, activation: str, form: RowForm) -> QuantisedRows:
        return quantise(self.gate(gate_up_N2I, activation), form)
