"""The decoder that all architectures share, over flat rows.

A row is a token with a position. The model does not decide which other rows it may see: it hands each layer's inputs to
`mix` and gets each row's result back. Serving passes attention over pages, training passes dense attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from stridelm.attention.base import Mix
from stridelm.cache.layout import LayerStates, Shared
from stridelm.kernels.ops import Ops
from stridelm.kernels.plain import PlainOps
from stridelm.models.layers.block import Block, CompiledBlocks, LayerSpec, Site, Stream, Tap, check_sizes, run_blocks
from stridelm.models.layers.embedding import Embedding
from stridelm.models.layers.layer_inputs import LayerInputs, LayerInputsSpec
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.rope import Ropes
from stridelm.models.layers.slots import ModelPart, Slots
from stridelm.parallel.shard import ONE, Shard
from stridelm.types import OVERRUN
from stridelm.values import LARGEST, number

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""A checkpoint's names of the two matrices that may be one; the embedding's is under the decoder's."""


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class ModelInput:
    """N rows on their way through a model."""

    ids_N: torch.Tensor
    """int64."""
    positions_N: torch.Tensor
    """int64."""
    mix: Mix
    tap: Tap | None = None
    tapped: tuple[int, ...] = ()
    """The layers at which it is called, in order."""
    onward_M: torch.Tensor | None = None
    """int64 rows that go on after the last layer that stores entries, for which `mix` returns values from there on;
    None: all."""


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder's shape, read from a Hugging Face config by the architecture's own file. Raises ValueError for
    impossible sizes."""

    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_length: int
    layers: tuple[LayerSpec, ...]
    tied: bool = False
    """Whether embedding and output head share a matrix."""
    tied_as_head: bool = False
    """Whether a checkpoint stores that matrix under the head's name."""
    extra_modules: int = 0
    """MTP modules that the checkpoint includes beside its layers. They are not part of this decoder."""
    module_layer: LayerSpec | None = None
    """The block of an MTP module for it; None: one like the last layer."""
    under: str = "model."
    """How the names of a checkpoint's tensors begin, except the head's. Those of other parts begin otherwise."""
    embedding_scale: float = 1.0
    """Multiplies embeddings."""
    logit_cap: float | None = None
    """Logits l become cap * tanh(l / cap)."""
    given: LayerInputsSpec | None = None
    """What each layer is given for every row beside the stream."""

    def __post_init__(self) -> None:
        check_sizes(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            max_position_embeddings=self.max_length,
        )
        number("rms_norm_eps", self.norm_eps, 0, 1)
        if self.logit_cap is not None:
            number("final_logit_softcapping", self.logit_cap, 0, LARGEST, open_low=True)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def embedding_name(self) -> str:
        """The embedding's matrix in a checkpoint."""
        return HEAD if self.tied_as_head else self.under + EMBEDDING

    @property
    def head_name(self) -> str:
        """The output head's."""
        return self.embedding_name if self.tied else HEAD

    def states(self, shard: Shard = ONE) -> LayerStates:
        """The state that a rank keeps of each layer."""
        return tuple(layer.mixer.state(shard) for layer in self.layers)

    @property
    def last_storing(self) -> int:
        """The last layer that keeps entries of its own. To later ones a row matters only if its last state does."""
        return max(i for i, state in enumerate(self.states()) if not isinstance(state, Shared))

    def prepare(self, ops: Ops, dtype: torch.dtype) -> None:
        """Compile what each kind of layer needs."""
        kinds: list[dict[str, Any]] = []
        for layer in self.layers:
            needs = {**layer.mixer.needs, **layer.mlp.needs}
            if needs not in kinds:
                kinds.append(needs)
                ops.prepare(dtype, **needs)


class Decoder(ModelPart):
    """ids and positions -> hidden states -> logits, over flat rows.

    `forward` returns the state after the final norm, [N, hidden]; `logits` turns chosen rows of it into [M, vocab].
    `ops` computes the row operations; serving replaces it by the device's own set.
    """

    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: DecoderSpec, shard: Shard = ONE) -> None:
        """shard: of its layers; embedding, norms and head are whole. Raises ValueError if the shares are not equal."""
        super().__init__()
        self.spec, self.shard = spec, shard
        self.last_storing = spec.last_storing
        self.ops: Ops = PlainOps()
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, spec.embedding_scale)
        self.given = None if spec.given is None else LayerInputs(spec.given, spec.hidden_size, spec.norm_eps)
        # Draft rows of a step may lie beyond the context; what they yield is discarded.
        self.ropes = Ropes(spec.max_length + OVERRUN)
        self.blocks = nn.ModuleList(
            Block(layer, Site(i, spec.hidden_size, spec.norm_eps, self.ropes, shard=shard))
            for i, layer in enumerate(spec.layers)
        )
        self.compiled: CompiledBlocks | None = None
        """All blocks and the final norm."""
        self.norm = nn.Parameter(torch.empty(spec.hidden_size))
        self.head = Linear(spec.hidden_size, spec.vocab_size)
        if spec.tied:
            self.tie()
        mixers = [(i, layer.mixer) for i, layer in enumerate(spec.layers)]
        self._unread = tuple(
            f"{spec.under}layers.{i}.{mixer.name}.{part}" for i, mixer in mixers for part in mixer.unread
        )

    def tie(self) -> None:
        """Make the head use the embedding's weight."""
        self.head.weight = self.embed.weight

    def forward(self, rows: ModelInput) -> torch.Tensor:
        """[N, H], or [M, H] if only some rows go on."""
        x_NH = self.embed(rows.ids_N)
        given_NLW = None if self.given is None else self.given(rows.ids_N, x_NH, self.ops)
        stream = Stream(x_NH, self.ops, self.spec.norm_eps, given_NLW)
        del x_NH, given_NLW  # the stream frees them when it needs them no longer
        if self.compiled is not None and rows.onward_M is None and rows.ids_N.shape[0] <= self.compiled.max_rows:
            return self._in_stretches(self.compiled, stream, rows)
        positions_N = rows.positions_N
        for layer, block in enumerate(self.blocks):
            wanted_M = rows.onward_M if layer == self.last_storing else None
            tap = rows.tap if layer in rows.tapped else None
            block(stream, positions_N, rows.mix, tap, wanted_M=wanted_M)
            if wanted_M is not None:
                if not len(wanted_M):
                    return stream.x
                positions_N = positions_N.index_select(0, wanted_M)
        return stream.norm(self.norm)

    def _in_stretches(self, compiled: CompiledBlocks, stream: Stream, rows: ModelInput) -> torch.Tensor:
        """`forward`, with the layers from one that is tapped up to the next in one call if they can be."""
        start = 0
        for layer in rows.tapped:
            assert rows.tap is not None
            if layer > start and compiled.some(start, layer)(stream, rows.positions_N, rows.mix) is None:
                for block in self.blocks[start:layer]:
                    block(stream, rows.positions_N, rows.mix)
            rows.tap(layer, stream.settle())
            start = layer
        rest = compiled.some(start, self.spec.num_layers)
        return run_blocks(self.blocks[start:], rest, stream, rows.positions_N, rows.mix, self.norm)

    def logits(self, hidden_MH: torch.Tensor, head: Linear | None = None) -> torch.Tensor:
        """head: another one than the model's."""
        logits_MV, cap = (head or self.head)(hidden_MH), self.spec.logit_cap
        return logits_MV if cap is None else self.ops.soft_cap(logits_MV, cap)

    @property
    def layer_states(self) -> LayerStates:
        """The state that each layer keeps on this rank."""
        return self.spec.states(self.shard)

    def leaves_out(self, name: str) -> bool:
        """Whether a checkpoint may have a tensor of this name that the model does not read."""
        return name.startswith(self._unread) or self.part_beside(name) is not None

    def part_beside(self, name: str) -> str | None:
        """The part of a checkpoint, such as its vision tower, to which a tensor belongs; None for the text's."""
        outer, _, inner = self.spec.under.removesuffix(".").rpartition(".")
        if not outer or not name.startswith(f"{outer}."):
            return None
        part = name.split(".")[outer.count(".") + 1]
        return None if part == inner else part

    def slots(self, theirs: str = "") -> Slots:
        """Every tensor of a Hugging Face checkpoint, and where it goes."""
        under = theirs + self.spec.under
        yield from self._own("embed.weight", theirs + self.spec.embedding_name)
        if self.given is not None:
            yield from self._inner("given", under)
        for i in range(self.spec.num_layers):
            yield from self._inner(f"blocks.{i}", f"{under}layers.{i}.")
        yield from self._own("norm", under + "norm.weight")
        if not self.spec.tied:
            yield from self._inner("head", theirs + "lm_head.")
