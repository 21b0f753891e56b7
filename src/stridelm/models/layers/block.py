"""A decoder's block: a mixer and an MLP beside the residual stream, whatever kinds of either a layer has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from stridelm.attention.base import Mix
from stridelm.cache.layout import LayerState
from stridelm.kernels.ops import Ops
from stridelm.models.layers.linear import DENSE, WeightFormat
from stridelm.models.layers.rope import Ropes
from stridelm.models.layers.slots import ModelPart, Slots
from stridelm.parallel.shard import ONE, Shard


class Tap(Protocol):
    """Shown the residual stream on its way through the layers, by whoever wants more than the last state."""

    def __call__(self, layer: int, x_NH: torch.Tensor) -> None:
        """x: what layer `layer` reads, before its norm. It may be overwritten afterwards: copy what you keep."""
        ...


@dataclass(frozen=True)
class Site:
    """What a layer is built into."""

    layer: int
    """Its number, by which it calls `mix`."""
    width: int
    """Of the residual stream."""
    eps: float
    """Of norms."""
    ropes: Ropes
    reads: int | None = None
    """Width of what the mixer reads, if it is not the stream's."""
    weight_format: WeightFormat = DENSE
    shard: Shard = ONE


@dataclass(frozen=True, kw_only=True)
class MixerSpec:
    """How a layer's rows see one another: subclasses make the module and say what it remembers."""

    name: str = "self_attn"
    """What checkpoints call it in a block."""
    window: int | None = None
    """How many tokens a row sees, its own included; None: everything."""

    @property
    def needs(self) -> Mapping[str, Any]:
        """What `Ops.prepare` is to know of it."""
        return {}

    def state(self, shard: Shard = ONE) -> LayerState:
        """What a rank remembers, in the page group of its window. Raises ValueError for shares that would not be
        equal."""
        raise NotImplementedError

    def build(self, site: Site) -> ModelPart:
        """Its forward takes (x [N, reads], positions [N], mix, ops) and gives [N, width], a tensor of its own."""
        raise NotImplementedError


class MLPSpec(Protocol):
    """What is done to each row by itself."""

    @property
    def name(self) -> str:
        """What checkpoints call it in a block."""
        ...

    @property
    def needs(self) -> Mapping[str, Any]:
        """What `Ops.prepare` is to know of it."""
        ...

    def build(self, site: Site) -> ModelPart:
        """Its forward takes (x [N, width], ops) and gives [N, width]."""
        ...


@dataclass(frozen=True)
class LayerSpec:
    mixer: MixerSpec
    mlp: MLPSpec


class Stream:
    """The residual stream [N, H] on its way. A sum and the norm behind it are one operation, so what is added waits for
    the norm that follows, whosever that is.

    An object, and not a value handed on: whoever calls would hold the tensors that are done with.
    """

    def __init__(self, x_NH: torch.Tensor, ops: Ops, eps: float) -> None:
        """x is not written to."""
        self.ops, self.eps = ops, eps
        self.x = x_NH
        """Without what waits."""
        self._waiting: torch.Tensor | None = None

    def add(self, delta_NH: torch.Tensor) -> None:
        """delta may be overwritten."""
        assert self._waiting is None
        self._waiting = delta_NH

    def norm(self, weight_H: torch.Tensor) -> torch.Tensor:
        """Of all that was added."""
        if self._waiting is None:
            return self.ops.norm(self.x, weight_H, self.eps)
        # It may write into the first, and the second may be somebody else's.
        self.x, normed_NH = self.ops.add_norm(self._waiting, self.x, weight_H, self.eps)
        self._waiting = None
        return normed_NH

    def sum(self) -> torch.Tensor:
        """The stream with all that was added, where no norm follows."""
        return self.x if self._waiting is None else self.x + self._waiting

    def keep(self, rows_M: torch.Tensor) -> None:
        """Go on with these rows alone."""
        assert self._waiting is None
        self.x = self.x.index_select(0, rows_M)


class Block(ModelPart):
    """Pre-norm block: mixer and MLP, each behind a norm of the stream that it adds to."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec, site: Site, *, normed: bool = True) -> None:
        """normed: there is a norm in front of the mixer; otherwise it is told what to read."""
        super().__init__()
        self.spec, self.layer = spec, site.layer
        self.mixer_norm = nn.Parameter(torch.empty(site.width)) if normed else None
        self.mixer = spec.mixer.build(site)
        self.mlp_norm = nn.Parameter(torch.empty(site.width))
        self.mlp = spec.mlp.build(site)

    def forward(
        self,
        stream: Stream,
        positions_N: torch.Tensor,
        mix: Mix,
        tap: Tap | None = None,
        read_NC: torch.Tensor | None = None,
        wanted_M: torch.Tensor | None = None,
    ) -> None:
        """Add to the stream; with `wanted`, go on behind the mixer with these rows alone, for which `mix` gives values.

        read: what the mixer reads, if the block has no norm in front.
        """
        if self.mixer_norm is not None:
            read_NC = stream.norm(self.mixer_norm)
        if tap is not None:
            tap(self.layer, stream.x)
        if wanted_M is not None:
            stream.keep(wanted_M)
        stream.add(self.mixer(read_NC, positions_N, mix, stream.ops))
        read_NC = stream.norm(self.mlp_norm)  # by the same name: what the mixer read is done with
        stream.add(self.mlp(read_NC, stream.ops))

    def slots(self, theirs: str = "") -> Slots:
        if self.mixer_norm is not None:
            yield from self._own("mixer_norm", theirs + "input_layernorm.weight")
        yield from self._own("mlp_norm", theirs + "post_attention_layernorm.weight")
        yield from self._inner("mixer", f"{theirs}{self.spec.mixer.name}.")
        yield from self._inner("mlp", f"{theirs}{self.spec.mlp.name}.")


def check_sizes(**sizes: int) -> None:
    """Raise ValueError for a size that nothing can have."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1; got {size}")
