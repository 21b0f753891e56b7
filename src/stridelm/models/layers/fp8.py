"""Weights in eight bits with scales, and products of rows that are quantised as they come (kernels/plain_fp8.py).

- by block: a scale for every 128 x 128 numbers of a matrix, and one for every 128 columns of a row (DeepSeek-V3, arXiv
  2412.19437, section 3.3), any number or a power of two (DeepSeek-V3.1);
- by channel: a scale for every output feature, and one for a whole row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import gcd
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.kernels.ops import Parts
from stridelm.kernels.plain_fp8 import BLOCK, E4M3, form_of, plain_product
from stridelm.kernels.row_forms import RowForm, Rows
from stridelm.models.layers.expert_products import ExpertProducts, StoredExperts
from stridelm.models.layers.fp8_experts import FP8Experts, chosen_fp8_experts
from stridelm.models.layers.linear import Linear, Stack, bias_of, bias_slots
from stridelm.models.layers.products import Product, ones_of_parts, tiled_product, with_ones
from stridelm.models.layers.slots import WHOLE, Slots, WeightSlot

CAPABILITY = (8, 9)
"""The first whose tensor cores multiply such numbers."""


class FP8Format:
    """Parameters: weight [O, I], weight_scale [Q, S] and bias. By block, the rows of `G` consecutive outputs share a
    row of scales: 128, or the largest power of two that divides all matrices of a stack but the last."""

    replaceable: ClassVar[bool] = False
    kept = frozenset(("weight", "weight_scale"))

    def __init__(self, name: str, scale: str, *, by_block: bool, powers: bool = False) -> None:
        """scale: what checkpoints call a weight's scales. powers: whether they, and those of rows, are powers of
        two."""
        self.name, self.scale, self.by_block, self.powers = name, scale, by_block, powers

    def parameters(self, stack: Stack) -> Mapping[str, nn.Parameter | None]:
        """Raises ValueError for shares that would cut a block, or rows that are quantised whole."""
        self._check_split(stack)
        weight = torch.empty(stack.out_features, stack.in_features, dtype=E4M3)
        columns = self.scales_of(weight.shape)[1]
        scale = torch.empty(-(-stack.out_features // self._group(stack)), columns, dtype=torch.float32)
        return {
            "weight": nn.Parameter(weight, requires_grad=False),
            "weight_scale": nn.Parameter(scale, requires_grad=False),
            "bias": bias_of(stack),
        }

    def slots(self, stack: Stack, start: int, stop: int) -> Slots:
        group = self._group(stack)
        split = stack.split if self.by_block or stack.split.dim == 0 else WHOLE
        repeat = BLOCK // group if self.by_block else 1
        yield "weight", WeightSlot("weight", start, stop, stack.split)
        yield self.scale, WeightSlot("weight_scale", start // group, -(-stop // group), split, repeat)
        yield from bias_slots(stack, start, stop)

    def scales_of(self, shape: torch.Size) -> torch.Size:
        """The shape of the scales of one matrix in a checkpoint."""
        outputs, inputs = shape
        return torch.Size((-(-outputs // BLOCK), -(-inputs // BLOCK)) if self.by_block else (outputs, 1))

    def _group(self, stack: Stack) -> int:
        """G."""
        return gcd(BLOCK, stack.unit) if self.by_block else 1

    def _check_split(self, stack: Stack) -> None:
        if stack.split.world == 1 or (stack.split.dim == 0 and not self.by_block):
            return
        sizes = stack.outs if stack.split.dim == 0 else (stack.in_features,)
        if not self.by_block or any(size % BLOCK for size in sizes):
            what = f"blocks of {BLOCK} features" if self.by_block else "whole rows"
            shares = ", ".join(map(str, sorted(set(sizes))))
            raise ValueError(f"{self.name} has scales for {what}, which shares of {shares} features would cut")

    def check(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
            raise ValueError(
                f"{self.name} weights need a GPU of compute capability {'.'.join(map(str, CAPABILITY))} or later; give "
                "the checkpoint that they were quantised from, without quantization, or another device"
            )

    @property
    def plain(self) -> Product:
        return partial(plain_product, powers=self.powers)

    def product(self, layer: Linear, *, deterministic: bool, shared: bool) -> Product:
        assert not shared
        scale = layer.get_parameter("weight_scale")
        return chosen(layer.weight, scale, layer.bias, deterministic=deterministic, powers=self.powers)

    def plain_experts(self, layer: StoredExperts) -> ExpertProducts:
        return FP8Experts(layer, F.linear, self.powers)

    def experts(self, layer: StoredExperts, *, deterministic: bool) -> ExpertProducts:
        return chosen_fp8_experts(layer, deterministic=deterministic, powers=self.powers)


BY_BLOCK = FP8Format("FP8 by block", "weight_scale_inv", by_block=True)
BY_BLOCK_POWERS = FP8Format("FP8 by block (UE8M0)", "weight_scale_inv", by_block=True, powers=True)
BY_CHANNEL = FP8Format("FP8 by channel", "weight_scale", by_block=False)


def chosen(
    weight_OI: torch.Tensor,
    scale_QS: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    deterministic: bool,
    powers: bool,
) -> Product:
    """The fastest product for the weight's device. powers: whether scales are powers of two."""
    if weight_OI.is_cuda:
        from stridelm.kernels import fp8, fp8_library

        if fp8.can_multiply(weight_OI, torch.bfloat16):
            arrivals = None if deterministic else fp8.no_arrivals(weight_OI.device)
            ones = None if deterministic else ones_of_parts(weight_OI.device)
            form = form_of(scale_QS, powers)
            return FP8Product(form, arrivals, fp8_library.can_multiply(weight_OI, scale_QS, bias_O, form), ones)
    return partial(plain_product, by=tiled_product if deterministic else F.linear, powers=powers)


class FP8Product:
    """Our kernels (kernels/fp8.py), and for many rows the library's (kernels/fp8_library.py). Unless they are the fast
    ones, a row's bits do not depend on the rows beside it: then the library's run where they were seen to agree."""

    def __init__(
        self, row_form: RowForm, arrivals: torch.Tensor | None, library: bool, ones: torch.Tensor | None = None
    ) -> None:
        """arrivals: of the fast ones. Each layer has its own, since two layers may run on different streams. library:
        whether it multiplies by this weight. ones: of `ones_of_parts`, if sums may be left in parts."""
        self.row_form, self.arrivals, self.library, self.ones = row_form, arrivals, library, ones

    def fuses_gate(self, x: Rows, is_given: bool = False) -> bool:
        from stridelm.kernels.fp8 import FUSED_ROWS

        return not is_given and 0 < x.shape[0] <= FUSED_ROWS and x.dtype != torch.float64

    def __call__(
        self,
        x: Rows,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None = None,
    ) -> torch.Tensor:
        from stridelm.kernels import fp8, fp8_library
        from stridelm.kernels.quantise import quantised

        if x.dtype == torch.float64:
            return plain_product(x, weight, scale, bias, tiled_product, self.row_form is RowForm.POWERS)
        x = quantised(x, self.row_form)
        if self.library and x.shape[0] >= fp8_library.FASTER_FROM and x.dtype == torch.bfloat16 and activation is None:
            if self.arrivals is not None:
                return fp8_library.multiply(x, weight, scale, bias)
            if fp8_library.agrees(x, weight, bias):
                return fp8_library.multiply(x, weight, scale, bias, fp8_library.TRIED)
        return fp8.product(x, weight, scale, bias, activation, arrivals=self.arrivals)

    def parts(self, x: Rows, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Parts | None:
        """The product in parts that whoever reads it adds up, where that is faster."""
        from stridelm.kernels.fp8 import left_in_parts, number_of_parts
        from stridelm.kernels.quantise import quantised

        if (
            self.ones is None
            or bias is not None
            or x.dtype == torch.float64
            or number_of_parts(x.shape[0], weight) == 1
        ):
            return None
        return with_ones(left_in_parts(quantised(x, self.row_form), weight, scale), self.ones)

    def gated_rows(
        self,
        x: Rows,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        form: RowForm,
    ) -> Rows:
        from stridelm.kernels.fp8 import gated_product
        from stridelm.kernels.quantise import quantised

        if not form.by_block:  # no program has a whole row
            return self(x, weight, scale, bias, activation)
        x = quantised(x, self.row_form)
        return gated_product(x, weight, scale, bias, activation, form, arrivals=self.arrivals)
