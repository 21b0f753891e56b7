"""Medusa heads (arXiv 2401.10774, section 2.1.1): the module, used for serving and training, and its storage layout.

Legend: R requests, D heads, H hidden width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.draft.base import TargetInfo
from stridelm.draft.given import Given
from stridelm.draft.heads import LoadableModule
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.slots import ModelPart, Slots

_TENSOR = re.compile(r"(?:medusa_head\.)?(\d+\.\d+\.(?:weight|linear\.weight|linear\.bias))")


class MedusaHead(ModelPart):
    """x + SiLU(W x + b) for each block, then a vocabulary matrix."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, width: int, vocab_size: int, blocks: int, bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Linear(width, width, bias=bias) for _ in range(blocks))
        self.out = Linear(width, vocab_size)

    def forward(self, x_RH: torch.Tensor) -> torch.Tensor:
        """[R, V]."""
        for block in self.blocks:
            x_RH = x_RH + F.silu(block(x_RH))
        return self.out(x_RH)

    def slots(self, theirs: str = "") -> Slots:
        for block in range(len(self.blocks)):
            yield from self._inner(f"blocks.{block}", f"{theirs}{block}.linear.")
        yield from self._inner("out", f"{theirs}{len(self.blocks)}.")


class MedusaHeads(LoadableModule):
    """Parallel heads: from the target's hidden state that gave token i, head j guesses token i + 1 + j."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, layout: MedusaLayout) -> None:
        super().__init__()
        self.layout = layout
        sizes = (layout.width, layout.vocab_size, layout.blocks, layout.bias)
        self.heads = nn.ModuleList(MedusaHead(*sizes) for _ in range(layout.heads))

    def forward(self, x_RH: torch.Tensor, depth: int) -> torch.Tensor:
        """[R, depth, V] logits of the first `depth` heads."""
        return torch.stack([head(x_RH) for head in cast("list[MedusaHead]", list(self.heads)[:depth])], 1)

    def slots(self, theirs: str = "") -> Slots:
        """Every tensor, by normalised name."""
        for head in range(len(self.heads)):
            yield from self._inner(f"heads.{head}", f"{theirs}{head}.")


@dataclass(frozen=True)
class MedusaLayout:
    """Heads as their directory describes them."""

    given: Given
    heads: int
    blocks: int
    """Residual blocks of each head."""
    width: int
    vocab_size: int
    bias: bool

    @classmethod
    def of(cls, given: Given) -> MedusaLayout | None:
        """None if the directory holds no Medusa heads.

        The tensors decide: config.json of the first released heads has 2 where there are 5.
        """
        shapes = {name: shape for stored, shape in given.shapes.items() if (name := spelling(stored)) is not None}
        blocks = sum(re.fullmatch(r"0\.\d+\.linear\.weight", name) is not None for name in shapes)
        out = shapes.get(f"0.{blocks}.weight")
        if out is None or len(out) != 2:
            return None
        found = 1 + max(int(name.partition(".")[0]) for name in shapes)
        heads = max(found, given.config.get("medusa_num_heads") or 0)
        return cls(given, heads, blocks, out[1], out[0], "0.0.linear.bias" in shapes)

    def misfit(self, target: TargetInfo) -> str | None:
        """Why the heads do not fit this target, with the remedy; None if they do."""
        path, remedy = self.given.path, "give the heads that were trained for this model"
        if self.width != target.config.hidden_size:
            return f"{path} has hidden size {self.width} and the model {target.config.hidden_size}; {remedy}"
        if self.vocab_size != target.vocab_size:
            return f"{path} says {self.vocab_size} tokens and the model {target.vocab_size}; {remedy}"
        return None

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The heads' tensors alone: some come in one directory with the model that they were trained with."""
        for stored, tensor in self.given.tensors(device, lambda name: spelling(name) is not None):
            name = spelling(stored)
            assert name is not None
            yield name, tensor


def spelling(name: str) -> str | None:
    """A tensor's name without the prefix that some releases give it; None if it does not belong to a head."""
    match = _TENSOR.fullmatch(name)
    return None if match is None else match[1]
