"""Inputs of single layers ("per-layer embeddings"): beside the stream, each layer is given a few numbers of its own for
every row, made from the row's token alone.

Legend: N rows, L layers, W width of a layer's input, H width of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from stridelm.kernels.ops import ACTIVATIONS, Ops
from stridelm.models.layers.block import InputPart, Site, check_sizes
from stridelm.models.layers.embedding import Embedding
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.slots import ModelPart, Slots


@dataclass(frozen=True, kw_only=True)
class LayerInputSpec:
    """A layer's use of its input. Raises ValueError for an impossible width."""

    width: int
    activation: str
    """The gate's activation, one of kernels.ops.ACTIVATIONS."""

    def __post_init__(self) -> None:
        check_sizes(hidden_size_per_layer_input=self.width)
        assert self.activation in ACTIVATIONS

    def build(self, site: Site) -> LayerInput:
        return LayerInput(self, site)


class LayerInput(InputPart):
    """out(activation(gate x) * given): of which a layer adds the norm to the stream x because of its input."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: LayerInputSpec, site: Site) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate = Linear(site.width, spec.width, weight_format=site.weight_format)
        self.out = Linear(spec.width, site.width, weight_format=site.weight_format)
        self.norm = nn.Parameter(torch.empty(site.width))

    def forward(self, x_NH: torch.Tensor, given_NW: torch.Tensor, ops: Ops) -> torch.Tensor:
        gated_NW = self.gate.gated(x_NH, ops, self.activation, given_NW)
        product: torch.Tensor = self.out(gated_NW)
        return product

    def slots(self, theirs: str = "") -> Slots:
        yield from self._inner("gate", theirs + "per_layer_input_gate.")
        yield from self._inner("out", theirs + "per_layer_projection.")
        yield from self._own("norm", theirs + "post_per_layer_input_norm.weight")


@dataclass(frozen=True, kw_only=True)
class LayerInputsSpec:
    """How all layers' inputs are made. Raises ValueError for impossible sizes."""

    vocab_size: int
    layers: int
    width: int

    def __post_init__(self) -> None:
        check_sizes(vocab_size_per_layer_input=self.vocab_size, hidden_size_per_layer_input=self.width)


class LayerInputs(ModelPart):
    """(norm(E P / sqrt(H)) + T) / sqrt(2), where E is the embedding as it enters the stream, P a projection and T a row
    of a table, times sqrt(W); the norm is over each layer's part."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: LayerInputsSpec, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.spec, self.eps = spec, eps
        self.table = Embedding(spec.vocab_size, spec.layers * spec.width, spec.width**0.5)
        self.project = Linear(hidden_size, spec.layers * spec.width)
        self.norm = nn.Parameter(torch.empty(spec.width))

    def forward(self, ids_N: torch.Tensor, x_NH: torch.Tensor, ops: Ops) -> torch.Tensor:
        """x: embeddings. Returns [N, L, W]."""
        rows, width = len(ids_N), self.spec.width
        made = self.project(x_NH) * x_NH.shape[1] ** -0.5
        made = ops.norm(made.view(-1, width), self.norm, self.eps).view(rows, -1)
        return ((made + self.table(ids_N)) * 2**-0.5).view(rows, -1, width)

    def slots(self, theirs: str = "") -> Slots:
        yield from self._own("table.weight", theirs + "embed_tokens_per_layer.weight")
        yield from self._inner("project", theirs + "per_layer_model_projection.")
        yield from self._own("norm", theirs + "per_layer_projection_norm.weight")
