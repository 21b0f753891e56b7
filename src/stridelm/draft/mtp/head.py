"""Native multi-token prediction modules: the head, used for serving and training.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): a module joins the norm of the next token's embedding and the norm of the
previous hidden state, runs one block of the target's own kind, and applies a norm to its output; embedding and output
head are the target's, unless the module stores others. MiMo (arXiv 2505.07608) joins the same two in the opposite
order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import nn

from stridelm.attention.base import Mix
from stridelm.draft.heads import DraftHead
from stridelm.models.layers.block import Block, LayerSpec, Site, Stream
from stridelm.models.layers.decoder import Decoder
from stridelm.models.layers.embedding import Embedding
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.slots import ModelPart, Slots


@dataclass(frozen=True)
class Form:
    """How a family of checkpoints names the tensors of its modules."""

    prefix: str
    """Of a module's tensors; {} is its number, from 0 or, with `behind_layers`, from the number of layers."""
    token_norm: str
    hidden_norm: str
    join: str
    norm: str
    block: str = ""
    """Prefix of the block's tensors, after the module's prefix."""
    hidden_first: bool = False
    behind_layers: bool = False
    """Modules are numbered on from the target's layers."""

    def module(self, number: int, layers: int) -> str:
        """Prefix of module `number`, for a target with `layers` layers."""
        return self.prefix.format(number + (layers if self.behind_layers else 0))


DEEPSEEK = Form("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", behind_layers=True)
MIMO = Form(
    "model.mtp_layers.{}.",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    hidden_first=True,
)
FORMS = (DEEPSEEK, MIMO)
EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.head.weight"
"""Matrices that DeepSeek's checkpoints repeat for each module, after its prefix."""


class MtpModule(ModelPart):
    """One module's weights; `MtpHead` runs it."""

    keeps_bits: ClassVar[bool] = True

    def __init__(
        self, layer: LayerSpec, site: Site, form: Form, *, embedding: Embedding | None, head: Linear | None
    ) -> None:
        """embedding, head: its own; None: the target's."""
        super().__init__()
        self.form, self.embedding, self.head = form, embedding, head
        self.token_norm = nn.Parameter(torch.empty(site.width))
        self.hidden_norm = nn.Parameter(torch.empty(site.width))
        self.join = Linear(2 * site.width, site.width)
        self.block = Block(layer, site)
        self.norm = nn.Parameter(torch.empty(site.width))

    def slots(self, theirs: str = "") -> Slots:
        form = self.form
        yield from self._own("token_norm", f"{theirs}{form.token_norm}.weight")
        yield from self._own("hidden_norm", f"{theirs}{form.hidden_norm}.weight")
        yield from self._inner("join", f"{theirs}{form.join}.")
        yield from self._own("norm", f"{theirs}{form.norm}.weight")
        yield from self._inner("block", theirs + form.block)
        if self.embedding is not None:
            yield from self._own("embedding.weight", theirs + EMBEDDING)
        if self.head is not None:
            yield from self._inner("head", theirs + HEAD.removesuffix("weight"))


class MtpHead(DraftHead):
    """The modules of a checkpoint; each passes on its hidden state after its own norm."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, target: Decoder, form: Form, modules: int, own: Collection[str] = ()) -> None:
        """target: supplies embedding, output head, rotary tables and the shape of a block; it is not a submodule. own:
        the checkpoint's names of the modules' embeddings and heads that are not the target's."""
        super().__init__()
        layer = (target.spec.module_layer or target.spec.layers[-1]).alone()
        self.spec = replace(target.spec, layers=(layer,) * modules)
        self.form, self.num_modules = form, modules
        self._target = (target,)  # in a tuple, so that its parameters do not count as this module's
        width, eps = self.spec.hidden_size, self.spec.norm_eps
        sites = [Site(number, width, eps, target.ropes) for number in range(modules)]
        vocab, scale = self.spec.vocab_size, self.spec.embedding_scale
        self.parts = nn.ModuleList(
            MtpModule(
                layer,
                site,
                form,
                embedding=Embedding(vocab, width, scale) if self._module(number) + EMBEDDING in own else None,
                head=Linear(width, vocab) if self._module(number) + HEAD in own else None,
            )
            for number, site in enumerate(sites)
        )

    def forward(
        self,
        module: int,
        ids_N: torch.Tensor,
        hidden_NH: torch.Tensor,
        positions_N: torch.Tensor,
        mix: Mix,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states after the module's norm."""
        part, target, ops, eps = cast(MtpModule, self.parts[module]), self._target[0], self.ops, self.spec.norm_eps
        token = (*(part.embedding or target.embed).lookup(ids_N), part.token_norm)
        both = ops.join_norms(*token, hidden_NH, part.hidden_norm, eps, hidden_first=self.form.hidden_first)
        stream = Stream(part.join(both), ops, eps)
        return part.block.then_norm(stream, positions_N, mix, part.norm, wanted_M)

    def logits(self, hidden_MH: torch.Tensor, module: int = 0) -> torch.Tensor:
        return self._target[0].logits(hidden_MH, cast(MtpModule, self.parts[module]).head)

    def slots(self, theirs: str = "") -> Slots:
        for number in range(self.num_modules):
            yield from self._inner(f"parts.{number}", theirs + self._module(number))

    def is_copy(self, name: str) -> bool:
        """Whether a tensor that has no place is a copy of the target's own."""
        return name in self.repeated or name.endswith("rotary_emb.inv_freq")

    @property
    def repeated(self) -> dict[str, str]:
        """Tensors that may be copies, each with the target's own."""
        spec = self._target[0].spec
        own = {EMBEDDING: spec.embedding_name, HEAD: spec.head_name}
        return {self._module(number) + name: own[name] for number in range(self.num_modules) for name in own}

    def _module(self, number: int) -> str:
        return self.form.module(number, self._target[0].spec.num_layers)
