"""EAGLE heads: one llama layer that reads a target's hidden states. The same modules serve and are trained.

EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858): a layer without an input norm reads a projection of the next token's
embedding joined to the target's last hidden state, and predicts the next hidden state; the target's own output head
gives the token's logits. EAGLE-3 (arXiv 2503.01840): the input is a projection of three inner hidden states; queries,
keys and values read it joined to the embedding, each after a norm of its own; an output head over a part of the
vocabulary gives the logits.

From one drafted token to the next, the layer's own output is passed on, before any norm.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from stridelm.attention.base import Mix
from stridelm.batch import States
from stridelm.draft.heads import DraftHead
from stridelm.models.layers.block import Block, Site, Stream
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.embedding import Embedding
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.rope import Ropes
from stridelm.models.layers.slots import Slots


class EagleHead(DraftHead):
    """Base of both kinds. Tensors are named as in EAGLE's own checkpoints, those of the layer "layers.0."."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, target: Decoder, spec: DecoderSpec, *, reads: int, own_embedding: bool) -> None:
        """target: supplies what the head does not have itself; not a submodule. spec: of the one layer. reads: input
        width of the queries, keys and values. own_embedding: whether the checkpoint has an embedding."""
        super().__init__()
        self.spec = spec
        self._target = (target,)  # in a tuple, so that its parameters do not count as this module's
        self._ropes = Ropes(target.ropes.length)
        site = Site(0, spec.hidden_size, spec.norm_eps, self._ropes, reads)
        self.block = Block(spec.layers[0], site, normed=False, settles=True)
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size) if own_embedding else None

    def prepare(self, device: torch.device) -> None:
        """Compute the rotary tables, which depend on the layer's own config."""
        self._ropes.prepare(device)

    @property
    def embed(self) -> Embedding:
        return self.embedding or self._target[0].embed

    def slots(self, theirs: str = "") -> Slots:
        if self.embedding is not None:
            yield from self._own("embedding.weight", theirs + "embed_tokens.weight")
        yield from self._inner("block", theirs + "layers.0.")

    def _layer(
        self,
        x_NC: torch.Tensor,
        residual_NH: torch.Tensor,
        positions_N: torch.Tensor,
        mix: Mix,
        wanted_M: torch.Tensor | None,
    ) -> torch.Tensor:
        stream = Stream(residual_NH, self.ops, self.spec.norm_eps)
        self.block(stream, positions_N, mix, read_NC=x_NC, wanted_M=wanted_M)
        return stream.settle()


class Eagle1Head(EagleHead):
    def __init__(self, target: Decoder, spec: DecoderSpec, *, own_embedding: bool, bias: bool) -> None:
        super().__init__(target, spec, reads=spec.hidden_size, own_embedding=own_embedding)
        self.join = Linear(2 * spec.hidden_size, spec.hidden_size, bias=bias)

    def forward(
        self,
        module: int,
        ids_N: torch.Tensor,
        hidden_NH: torch.Tensor,
        positions_N: torch.Tensor,
        mix: Mix,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.join(torch.cat((self.embed(ids_N), hidden_NH), dim=-1))
        return self._layer(x, x, positions_N, mix, wanted_M)

    def logits(self, hidden_MH: torch.Tensor, module: int = 0) -> torch.Tensor:
        return self._target[0].logits(hidden_MH)

    def slots(self, theirs: str = "") -> Slots:
        yield from super().slots(theirs)
        yield from self._inner("join", theirs + "fc.")


class Eagle3Head(EagleHead):
    ids: torch.Tensor
    """[Vd] int64 the target's id of each token in the head's vocabulary."""
    places: torch.Tensor
    """[V] int64 where each of the target's tokens is in the head's vocabulary; Vd for those that are not."""

    def __init__(
        self,
        target: Decoder,
        spec: DecoderSpec,
        *,
        own_embedding: bool,
        taps: tuple[int, ...],
        draft_vocab: int,
        norm_before_residual: bool,
    ) -> None:
        """taps: layers of the target whose inputs the head reads. draft_vocab: Vd, size of the head's vocabulary."""
        super().__init__(target, spec, reads=2 * spec.hidden_size, own_embedding=own_embedding)
        width = spec.hidden_size
        self.taps = taps
        self.norm_before_residual = norm_before_residual
        self.join = Linear(len(taps) * target.spec.hidden_size, width)
        self.token_norm = nn.Parameter(torch.empty(width))
        self.hidden_norm = nn.Parameter(torch.empty(width))
        self.norm = nn.Parameter(torch.empty(width))
        self.head = Linear(width, draft_vocab)
        self.register_buffer("ids", torch.empty(draft_vocab, dtype=torch.int64), persistent=False)
        vocab = target.spec.vocab_size
        self.register_buffer("places", torch.empty(vocab, dtype=torch.int64), persistent=False)

    def set_vocabulary(self, ids: torch.Tensor) -> None:
        """Let these be the target's ids of the tokens in the head's vocabulary."""
        own, vocab = len(ids), len(self.places)
        self.ids, nowhere = ids, torch.full((vocab,), own, device=ids.device)
        self.places = nowhere.index_copy_(0, ids, torch.arange(own, device=ids.device))

    @property
    def taken_width(self) -> int:
        return self.join.stack.in_features

    def read(self, states: States) -> tuple[torch.Tensor, ...]:
        """The tapped layers' inputs."""
        return tuple(states.inputs[layer] for layer in self.taps)

    def features(self, taken_NW: torch.Tensor) -> torch.Tensor:
        """[N, H] the projection of the tapped layers' inputs."""
        return self.join(taken_NW)

    def forward(
        self,
        module: int,
        ids_N: torch.Tensor,
        hidden_NH: torch.Tensor,
        positions_N: torch.Tensor,
        mix: Mix,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        eps = self.spec.norm_eps
        token = (*self.embed.lookup(ids_N), self.token_norm)
        both = self.ops.join_norms(*token, hidden_NH, self.hidden_norm, eps)
        residual = both[:, self.spec.hidden_size :].contiguous() if self.norm_before_residual else hidden_NH
        return self._layer(both, residual, positions_N, mix, wanted_M)

    def own_logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """[M, Vd] logits over the head's own vocabulary."""
        return self.head(self.ops.norm(hidden_MH, self.norm, self.spec.norm_eps))

    def logits(self, hidden_MH: torch.Tensor, module: int = 0) -> torch.Tensor:
        return self.ops.spread_logits(self.own_logits(hidden_MH), self.ids, self.places)

    def slots(self, theirs: str = "") -> Slots:
        yield from super().slots(theirs)
        yield from self._inner("join", theirs + "fc.")
        yield from self._own("token_norm", theirs + "layers.0.input_layernorm.weight")
        yield from self._own("hidden_norm", theirs + "layers.0.hidden_norm.weight")
        yield from self._own("norm", theirs + "norm.weight")
        yield from self._inner("head", theirs + "lm_head.")
