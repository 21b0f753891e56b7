"""A decoder's block: a mixer and an MLP of any kind, beside the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from stridelm.attention.base import Mix
from stridelm.cache.layout import LayerState
from stridelm.kernels.ops import Ops, Parts
from stridelm.kernels.row_forms import Rows
from stridelm.models.layers.linear import DENSE, WeightFormat
from stridelm.models.layers.rope import Ropes
from stridelm.models.layers.slots import ModelPart, Slots
from stridelm.parallel.shard import ONE, Shard


class Tap(Protocol):
    """Called with the residual stream at some layers, for callers that need more than the last state."""

    def __call__(self, layer: int, x_NH: torch.Tensor) -> None:
        """x: the input of layer `layer`, before its norm. Nobody writes to it afterwards."""
        ...


@dataclass(frozen=True)
class Site:
    """The surroundings in which a layer is built."""

    layer: int
    """The layer's number, which it passes to `mix`."""
    width: int
    """Width of the residual stream."""
    eps: float
    """Epsilon of the norms."""
    ropes: Ropes
    reads: int | None = None
    """Width of the mixer's input, if it is not the stream's."""
    weight_format: WeightFormat = DENSE
    shard: Shard = ONE


@dataclass(frozen=True, kw_only=True)
class MixerSpec:
    """How a layer's rows see one another: subclasses build the module and declare the state that it keeps."""

    name: str = "self_attn"
    """Its name within a block in checkpoints."""
    window: int | None = None
    """How many tokens a row sees, its own included; None: all."""

    @property
    def needs(self) -> Mapping[str, Any]:
        """The arguments that it needs `Ops.prepare` to get."""
        return {}

    @property
    def unread(self) -> tuple[str, ...]:
        """How names begin, within the mixer, of tensors that checkpoints may have and nothing reads."""
        return ()

    def alone(self) -> MixerSpec:
        """The same beside a model's layers: with entries of its own, for all tokens."""
        return replace(self, window=None)

    def state(self, shard: Shard = ONE) -> LayerState:
        """The state that a rank keeps of it, in the page group of its window. Raises ValueError if the ranks' shares
        would not be equal."""
        raise NotImplementedError

    def build(self, site: Site) -> ModelPart:
        """Its forward takes (x [N, reads], positions [N], mix, ops) and returns [N, width], a new tensor. It may also
        have `parts`, as an MLP may. x may be of the part's `row_form`."""
        raise NotImplementedError


class MLPSpec(Protocol):
    """The part of a layer that processes each row separately."""

    @property
    def name(self) -> str:
        """Its name within a block in checkpoints."""
        ...

    @property
    def reads_stream(self) -> bool:
        """Whether it reads the stream beside the norm of it."""
        ...

    @property
    def needs(self) -> Mapping[str, Any]:
        """The arguments that it needs `Ops.prepare` to get."""
        ...

    def build(self, site: Site) -> ModelPart:
        """Its forward takes (x [N, width], ops), and the stream [N, width] if it reads that. Returns [N, width]. A
        module that sums parts may also have `parts`, which takes the same and returns the same or its `Parts`, whose
        sum is then left to the operation that adds it to the stream; not called if ranks have shares of it. x may be of
        the part's `row_form`."""
        ...


class InputPart(ModelPart):
    norm: nn.Parameter
    """[width] weight of a norm of what it yields, before that is added to the stream."""


class InputSpec(Protocol):
    """The part of a layer that reads what the layer is given for each row beside the stream."""

    def build(self, site: Site) -> InputPart:
        """Its forward takes (x [N, width], given [N, W], ops) and returns [N, width]."""
        ...


@dataclass(frozen=True)
class LayerSpec:
    mixer: MixerSpec
    mlp: MLPSpec
    norms_after: bool = False
    """What the mixer and the MLP yield is normalised before it is added to the stream."""
    given: InputSpec | None = None
    """Adds to the stream after the MLP."""
    scaled: bool = False
    """In the end the stream is multiplied by a number of the layer's own."""

    def alone(self) -> LayerSpec:
        """The same beside a model's layers: with entries of its own, and given nothing but the stream."""
        return replace(self, mixer=self.mixer.alone(), given=None)


class Stream:
    """The residual stream [N, H] on its way through the layers. A sum and the norm after it are one operation, so what
    is added is deferred until the next norm, whichever module calls it. So are a norm of what is added, and a factor of
    the sum.

    An object rather than a value that is passed on: callers would otherwise keep tensors alive that are no longer
    needed.
    """

    def __init__(self, x_NH: torch.Tensor, ops: Ops, eps: float, given_NLW: torch.Tensor | None = None) -> None:
        """x is not written to. given: what each layer is given beside the stream."""
        self.ops, self.eps = ops, eps
        self.x = x_NH
        """The stream without the deferred addition."""
        self.given = given_NLW
        self._waiting: torch.Tensor | Parts | None = None
        self._after: torch.Tensor | None = None
        """Weight of a norm of what is to be added."""
        self._factor: torch.Tensor | None = None

    def add(self, delta: torch.Tensor | Parts, after_H: torch.Tensor | None = None) -> None:
        """Add delta [N, H], or its norm with the weight `after`. delta may be overwritten."""
        assert self._waiting is None and not (isinstance(delta, Parts) and after_H is not None)
        self._waiting, self._after = delta, after_H

    def norm(self, weight_H: torch.Tensor) -> torch.Tensor:
        """The norm of the stream with all additions."""
        if self._waiting is None:
            return self.ops.norm(self.x, weight_H, self.eps)
        if self._after is not None:
            normed_NH = self._add_normed(weight_H)
            assert normed_NH is not None
            return normed_NH
        if isinstance(self._waiting, Parts):
            self.x, normed_NH = self.ops.combine_norm(self._waiting, self.x, weight_H, self.eps)
            self._waiting = None
            return normed_NH
        # add_norm may overwrite its first argument, so that must not be self.x, which may belong to the caller.
        self.x, normed_NH = self.ops.add_norm(self._waiting, self.x, weight_H, self.eps)
        self._waiting = None
        return normed_NH

    def norm_for(self, weight_H: torch.Tensor, reader: ModelPart) -> Rows:
        """The same in the form in which its reader takes it."""
        form = reader.row_form
        if form is None or self._after is not None:
            return self.norm(weight_H)
        self.x, normed = self.ops.norm_quantised(
            self.x, weight_H, self.eps, form, self._waiting, keeps_dense=reader.reads_dense
        )
        self._waiting = None
        return normed

    @property
    def waits(self) -> bool:
        """Whether there is a deferred addition."""
        return self._waiting is not None

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The stream without the deferred addition, the latter, and whether there is one; both may be overwritten."""
        assert self._after is None
        if self._waiting is None:
            return self.x.clone(), torch.empty_like(self.x), False
        return self.x, self._delta(self._waiting), True

    def become(self, x_NH: torch.Tensor, delta_NH: torch.Tensor) -> None:
        """Continue with the stream x, to which delta is still to be added."""
        self.x, self._waiting = x_NH, delta_NH

    def settle(self) -> torch.Tensor:
        """The stream with all additions, none of which is deferred any longer: for use where no norm follows."""
        if self._after is not None:
            self._add_normed(None)
        elif self._waiting is not None:
            self.x, self._waiting = self.x + self._delta(self._waiting), None
        return self.x

    def _delta(self, waiting: torch.Tensor | Parts) -> torch.Tensor:
        return self.ops.combine(*waiting).to(self.x.dtype) if isinstance(waiting, Parts) else waiting

    def scale(self, factor_1: torch.Tensor) -> None:
        """Multiply the stream, with all additions."""
        if self._after is None:
            self.x = self.settle() * factor_1
        else:
            assert self._factor is None
            self._factor = factor_1

    def _add_normed(self, weight_H: torch.Tensor | None) -> torch.Tensor | None:
        assert isinstance(self._waiting, torch.Tensor) and self._after is not None
        done = self.ops.add_normed(self.x, self._waiting, self._after, self.eps, self._factor, weight_H)
        self.x, self._waiting, self._after, self._factor = done[0], None, None, None
        return done[1]

    def keep(self, rows_M: torch.Tensor) -> None:
        """Continue with these rows only."""
        assert self._waiting is None
        self.x = self.x.index_select(0, rows_M)
        if self.given is not None:
            self.given = self.given.index_select(0, rows_M)


class CompiledBlocks(Protocol):
    """Consecutive blocks as one call, for some steps."""

    max_rows: int
    """Of such a step."""

    def __call__(
        self,
        stream: Stream,
        positions_N: torch.Tensor,
        mix: Mix,
        norm_H: torch.Tensor | None = None,
        wanted_M: torch.Tensor | None = None,
        read_NC: Rows | None = None,
    ) -> torch.Tensor | None:
        """What the blocks' `forward` does with these arguments, and then the stream's norm, which is returned; without
        a norm, what is returned is meaningless. None if it cannot, and has done nothing."""
        ...

    def some(self, start: int, stop: int) -> CompiledBlocks:
        """Those of these blocks from number `start` up to `stop`."""
        ...


@runtime_checkable
class HasBlocks(Protocol):
    """A module whose blocks follow one another."""

    blocks: nn.ModuleList
    compiled: CompiledBlocks | None
    """All of them, and the norm after the last."""


class Block(ModelPart):
    """Mixer and MLP each read a norm of the stream and add to it."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec, site: Site, *, normed: bool = True, settles: bool = False) -> None:
        """normed: whether there is a norm before the mixer; without one, the caller passes the mixer's input. settles:
        whether the stream is read as it is after the block, and not its norm."""
        super().__init__()
        self.spec, self.layer, self.settles = spec, site.layer, settles
        self.leaves_parts = site.shard.world == 1 and not spec.norms_after
        """Whether what its parts return is added by whoever adds it to the stream."""
        self.mixer_norm = nn.Parameter(torch.empty(site.width)) if normed else None
        self.mixer = spec.mixer.build(site)
        self.mlp_norm = nn.Parameter(torch.empty(site.width))
        self.mlp = spec.mlp.build(site)
        self.after_mixer, self.after_mlp = (
            nn.Parameter(torch.empty(site.width)) if spec.norms_after else None for _ in range(2)
        )
        self.input = None if spec.given is None else spec.given.build(site)
        self.scalar = nn.Parameter(torch.empty(1)) if spec.scaled else None
        self.compiled: CompiledBlocks | None = None

    def _parts_of(self, part: ModelPart) -> Callable[..., torch.Tensor | Parts]:
        """The part's forward, or its `parts` if a norm comes after what it returns is added, none before, and no other
        rank has a share of it."""
        return getattr(part, "parts", part) if self.leaves_parts else part

    def forward(
        self,
        stream: Stream,
        positions_N: torch.Tensor,
        mix: Mix,
        tap: Tap | None = None,
        read_NC: Rows | None = None,
        wanted_M: torch.Tensor | None = None,
    ) -> None:
        """Add to the stream; with `wanted`, only these rows, for which `mix` returns values, continue after the mixer,
        and if there are none, the rest is left out.

        read: the mixer's input, if the block has no norm before it.
        """
        if tap is None and self.compiled is not None:
            if self.compiled(stream, positions_N, mix, wanted_M=wanted_M, read_NC=read_NC) is not None:
                return
        if self.mixer_norm is not None:
            read_NC = stream.norm_for(self.mixer_norm, self.mixer)
        if tap is not None:
            tap(self.layer, stream.x)
        if wanted_M is not None:
            stream.keep(wanted_M)
        mixed_NH = self._parts_of(self.mixer)(read_NC, positions_N, mix, stream.ops)
        if wanted_M is not None and not len(wanted_M):
            return
        stream.add(mixed_NH, self.after_mixer)
        del mixed_NH
        read_NC = stream.norm_for(self.mlp_norm, self.mlp)  # the same name, which frees the mixer's input
        beside = (stream.x,) if self.spec.mlp.reads_stream else ()
        mlp = self.mlp if self.settles else self._parts_of(self.mlp)
        stream.add(mlp(read_NC, stream.ops, *beside), self.after_mlp)
        if self.input is not None:
            assert stream.given is not None
            stream.add(self.input(stream.settle(), stream.given[:, self.layer], stream.ops), self.input.norm)
        if self.scalar is not None:
            stream.scale(self.scalar)

    def then_norm(
        self,
        stream: Stream,
        positions_N: torch.Tensor,
        mix: Mix,
        norm_H: torch.Tensor,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward`, and then the stream's norm."""
        if self.compiled is not None:
            normed_NH = self.compiled(stream, positions_N, mix, norm_H, wanted_M)
            if normed_NH is not None:
                return normed_NH
        self(stream, positions_N, mix, wanted_M=wanted_M)
        return stream.norm(norm_H)

    def slots(self, theirs: str = "") -> Slots:
        if self.mixer_norm is not None:
            yield from self._own("mixer_norm", theirs + "input_layernorm.weight")
        if self.after_mixer is None:
            yield from self._own("mlp_norm", theirs + "post_attention_layernorm.weight")
        else:  # that name is of another norm there
            yield from self._own("after_mixer", theirs + "post_attention_layernorm.weight")
            yield from self._own("mlp_norm", theirs + "pre_feedforward_layernorm.weight")
            yield from self._own("after_mlp", theirs + "post_feedforward_layernorm.weight")
        if self.input is not None:
            yield from self._inner("input", theirs)
        if self.scalar is not None:
            yield from self._own("scalar", theirs + "layer_scalar")
        yield from self._inner("mixer", f"{theirs}{self.spec.mixer.name}.")
        yield from self._inner("mlp", f"{theirs}{self.spec.mlp.name}.")


def run_blocks(
    blocks: nn.ModuleList,
    compiled: CompiledBlocks | None,
    stream: Stream,
    positions_N: torch.Tensor,
    mix: Mix,
    norm_H: torch.Tensor,
) -> torch.Tensor:
    """All blocks and then the stream's norm, as one call if they can be."""
    normed_NH = None if compiled is None else compiled(stream, positions_N, mix, norm_H)
    if normed_NH is not None:
        return normed_NH
    for block in blocks:
        block(stream, positions_N, mix)
    return stream.norm(norm_H)


def check_sizes(at_least: int = 1, /, **sizes: Any) -> None:
    """Raise ValueError for a size that is not a whole number, or too small."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < at_least:
            raise ValueError(f"{name} must be at least {at_least}, and a whole number; got {size!r}")
