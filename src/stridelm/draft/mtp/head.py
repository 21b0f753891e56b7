"""Native multi-token prediction modules over a dense target: the head that serves and that is trained.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): a module joins the norm of the next token's embedding and the norm of the
state before it, runs one block of the target's own kind, and norms what comes out; embedding and output head are the
target's. MiMo (arXiv 2505.07608) joins the same two the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from stridelm.attention.base import Mix
from stridelm.cache.layout import HeadsKV, LayerStates
from stridelm.draft.heads import DraftHead
from stridelm.models.layers.decoder import Block, Decoder, DecoderSpec, WeightSlot, block_slots
from stridelm.models.layers.linear import Linear
from stridelm.types import States


@dataclass(frozen=True)
class Form:
    """How a family of checkpoints lays its modules out."""

    prefix: str
    """Of a module's tensors; {} is its number, counted from `first`."""
    token_norm: str
    hidden_norm: str
    join: str
    norm: str
    block: str = ""
    """Prefix of the block's tensors behind the module's."""
    hidden_first: bool = False
    behind_layers: bool = False
    """Modules are numbered on behind the target's layers."""

    def module(self, number: int, layers: int) -> str:
        """Prefix of module `number` of a target with so many layers."""
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


class MtpModule(nn.Module):
    def __init__(self, spec: DecoderSpec, number: int) -> None:
        super().__init__()
        self.token_norm = nn.Parameter(torch.empty(spec.hidden_size))
        self.hidden_norm = nn.Parameter(torch.empty(spec.hidden_size))
        self.join = Linear(2 * spec.hidden_size, spec.hidden_size)
        self.block = Block(spec, number)
        self.norm = nn.Parameter(torch.empty(spec.hidden_size))


class MtpHead(DraftHead):
    """The modules of a checkpoint; what is fed on is the state behind a module's own norm."""

    def __init__(self, target: Decoder, form: Form, modules: int) -> None:
        """target: gives embedding, output head, rotation and the shape of a block, and is no part of this module."""
        super().__init__()
        self.spec = replace(target.spec, windows=(None,) * target.spec.num_layers)
        self.form, self.num_modules = form, modules
        self._target = (target,)  # in a tuple, so that its parameters are not taken for ours
        self.parts = nn.ModuleList(MtpModule(self.spec, number) for number in range(modules))

    @property
    def layer_states(self) -> LayerStates:
        s = self.spec
        return (HeadsKV.of(s.num_heads, s.num_kv_heads, s.head_dim),) * self.num_modules

    def features(self, states: States, rows_N: torch.Tensor) -> torch.Tensor:
        """[N, H]: the target's state behind its final norm."""
        return states.final.index_select(0, rows_N)

    def forward(
        self,
        module: int,
        ids_N: torch.Tensor,
        hidden_NH: torch.Tensor,
        positions_N: torch.Tensor,
        mix: Mix,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States behind the module's norm."""
        part, target, ops, eps = cast(MtpModule, self.parts[module]), self._target[0], self.ops, self.spec.norm_eps
        token = ops.norm(target.embed(ids_N), part.token_norm, eps)
        hidden = ops.norm(hidden_NH, part.hidden_norm, eps)
        x = part.join(torch.cat((hidden, token) if self.form.hidden_first else (token, hidden), dim=-1))
        block, angles = part.block, (positions_N, target.rope.cos, target.rope.sin)
        h = ops.norm(x, block.attention_norm, eps)
        attended = block.attention(h, angles, mix)
        x, h = ops.add_norm(x if wanted_M is None else x.index_select(0, wanted_M), attended, block.mlp_norm, eps)
        return ops.add_norm(x, block.mlp(h, ops), part.norm, eps)[1]

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        return self._target[0].logits(hidden_MH)

    def checkpoint_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Every tensor of the modules, as the form names it."""
        width, form = self.spec.hidden_size, self.form
        for number in range(self.num_modules):
            theirs, ours = form.module(number, self.spec.num_layers), f"parts.{number}."
            for name, parameter in ((form.token_norm, "token_norm"), (form.hidden_norm, "hidden_norm")):
                yield f"{theirs}{name}.weight", WeightSlot(ours + parameter, 0, width)
            yield f"{theirs}{form.join}.weight", WeightSlot(ours + "join.weight", 0, width)
            yield f"{theirs}{form.norm}.weight", WeightSlot(ours + "norm", 0, width)
            yield from block_slots(self.spec, theirs + form.block, f"{ours}block.")

    def is_copy(self, name: str) -> bool:
        """Whether a tensor is the target's own, which DeepSeek's checkpoints hold once more for each module."""
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        own = {
            self.form.module(number, self.spec.num_layers) + copy
            for number in range(self.num_modules)
            for copy in copies
        }
        return name in own or name.endswith("rotary_emb.inv_freq")
