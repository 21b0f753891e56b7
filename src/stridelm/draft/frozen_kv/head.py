"""A head that keeps no keys and values: its layers make queries alone, and attend to a target's entries. The same
module serves and is trained.

It follows transformers' `Gemma4AssistantForCausalLM`. A guess is made from the last token's embedding, as the target
reads it, and a hidden state as wide as the target's: `pre` takes both to the head's own width, its layers follow, and
after the norm there are two ways on. The output head gives the next token's logits, and `post` the hidden state from
which the token after that is guessed.

Legend: N rows, M rows with logits, H hidden width, B the target's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from stridelm.attention.base import Mix
from stridelm.cache.layout import HeadsKV, LayerState, LayerStates, Shared
from stridelm.draft.frozen_kv.ordered import Centroids, OrderedHead
from stridelm.draft.heads import DraftHead
from stridelm.models.layers.attention import HeadsSpec
from stridelm.models.layers.block import Block, CompiledBlocks, Site, Stream, run_blocks
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.rope import Ropes
from stridelm.models.layers.slots import Slots

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class FrozenKVHead(DraftHead):
    keeps_bits: ClassVar[bool] = True

    def __init__(
        self, target: Decoder, spec: DecoderSpec, centroids: Centroids | None = None, *, tied: bool = True
    ) -> None:
        """target: supplies the embedding and says how its layers are cut over ranks; not a submodule. spec: of layers
        that read the target's. tied: how the output head's matrix is named in a checkpoint."""
        super().__init__()
        self.spec, self.tied = spec, tied
        self._target = (target,)  # in a tuple, so that its parameters do not count as this module's
        self._ropes = Ropes(target.ropes.length)
        width, read = spec.hidden_size, target.spec.hidden_size
        self.pre, self.post = Linear(2 * read, width), Linear(width, read)
        sites = [Site(i, width, spec.norm_eps, self._ropes, shard=target.shard) for i in range(spec.num_layers)]
        self.blocks = nn.ModuleList(Block(layer, site) for layer, site in zip(spec.layers, sites, strict=True))
        self.compiled: CompiledBlocks | None = None
        self.norm = nn.Parameter(torch.empty(width))
        vocab_size = spec.vocab_size
        self.head = Linear(width, vocab_size) if centroids is None else OrderedHead(width, vocab_size, centroids)

    @property
    def target(self) -> Decoder:
        return self._target[0]

    def prepare(self, device: torch.device) -> None:
        """Compute the rotary tables."""
        self._ropes.prepare(device)

    @property
    def sources(self) -> tuple[int, ...]:
        """The layer of the target that each layer reads."""
        mixers = [layer.mixer for layer in self.spec.layers]
        return tuple(mixer.reads for mixer in mixers if isinstance(mixer, HeadsSpec) and mixer.reads is not None)

    @property
    def layer_states(self) -> LayerStates:
        return self.reading(self.target.layer_states)

    def reading(self, kept: LayerStates) -> LayerStates:
        """What each layer makes of the entries that it reads, in the page group where they are. kept: of each layer of
        the target, as its entries are stored."""
        own = self.spec.states(self.target.shard)
        return tuple(_reading(state, kept[source]) for state, source in zip(own, self.sources, strict=True))

    def forward(
        self,
        module: int,
        ids_N: torch.Tensor,
        hidden_NH: torch.Tensor,
        positions_N: torch.Tensor,
        mix: Mix,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[N, H] after the norm. hidden: [N, B], `features` or what `passed_on` makes of an earlier output."""
        assert module == 0 and wanted_M is None
        joined = torch.cat((self.target.embed(ids_N), hidden_NH), dim=-1)
        stream = Stream(self.pre(joined), self.ops, self.spec.norm_eps)
        return run_blocks(self.blocks, self.compiled, stream, positions_N, mix, self.norm)

    def passed_on(self, out_NH: torch.Tensor) -> torch.Tensor:
        """[N, B] the hidden state from which the next token is guessed."""
        return self.post(out_NH)

    def logits(self, hidden_MH: torch.Tensor, module: int = 0) -> torch.Tensor:
        return self.head(hidden_MH, self.ops) if isinstance(self.head, OrderedHead) else self.head(hidden_MH)

    def slots(self, theirs: str = "") -> Slots:
        yield from self._inner("pre", theirs + "pre_projection.")
        for i in range(self.spec.num_layers):
            yield from self._inner(f"blocks.{i}", f"{theirs}model.layers.{i}.")
        yield from self._own("norm", theirs + "model.norm.weight")
        yield from self._inner("post", theirs + "post_projection.")
        yield from self._own("head.weight", theirs + (EMBEDDING if self.tied else HEAD))
        if isinstance(self.head, OrderedHead):
            yield from self._inner("head.scores", theirs + "masked_embedding.centroids.")

    def leaves_out(self, name: str) -> bool:
        """Whether a checkpoint may have a tensor of this name that nothing reads."""
        layers = enumerate(self.spec.layers)
        unread = tuple(f"model.layers.{i}.{each.mixer.name}.{part}" for i, each in layers for part in each.mixer.unread)
        return name == (HEAD if self.tied else EMBEDDING) or name.startswith(unread)


def _reading(own: LayerState, kept: LayerState) -> LayerState:
    """The state of a layer that reads entries of state `kept`, however those are stored. A row of the target sees its
    own entry as the last of a window; the row that guesses from the same token has none, and sees one entry fewer."""
    assert isinstance(own, Shared) and isinstance(own.entries, HeadsKV) and isinstance(kept, HeadsKV)
    entries = replace(kept, heads=own.entries.heads, scale=own.entries.scale)
    return Shared(kept.group, None if own.window is None else own.window - 1, own.layer, entries)
