"""An output head that computes the logits of few tokens: those that a row's best centroids stand for.

The vocabulary is divided into equal parts, each with a centroid; which tokens are whose is a list of its own. A row is
compared with all centroids, and only the tokens of the best have logits. All others have none at all, where
transformers gives them one below the lowest, which a sampled guess could be.

Legend: M rows, H hidden width, V tokens, C centroids, S tokens with a logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.models.layers.linear import Linear
from stridelm.models.layers.products import Product, chosen
from stridelm.models.layers.slots import ModelPart


@dataclass(frozen=True)
class Centroids:
    """How a vocabulary is divided: of `count` equal parts, the `best` get logits."""

    count: int
    best: int


class OrderedHead(ModelPart):
    keeps_bits: ClassVar[bool] = True
    ids: torch.Tensor
    """[C, V / C] int64 the tokens of each centroid."""

    def __init__(self, width: int, vocab_size: int, centroids: Centroids) -> None:
        super().__init__()
        self.centroids = centroids
        self.scores = Linear(width, centroids.count)
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        ids = torch.empty(centroids.count, vocab_size // centroids.count, dtype=torch.int64)
        self.register_buffer("ids", ids, persistent=False)
        self.in_turn = False
        """Row by row: each is one product of the same shape, and no copy is made of all rows' matrices."""
        self.whole: Product | None = None
        """Computes all logits, of which few are taken: its products keep equal bits."""

    def choose_products(self, *, deterministic: bool) -> None:
        self.in_turn = self.weight.device.type == "cpu"
        all_at_once = deterministic and not self.in_turn
        self.whole = chosen(self.weight, False, deterministic=True) if all_at_once else None

    def forward(self, x_MH: torch.Tensor) -> torch.Tensor:
        """[M, V]; -inf for tokens of other centroids."""
        best = self.scores(x_MH).topk(self.centroids.best, sorted=False).indices
        ids_MS = self.ids[best].flatten(1)
        own_MS = self._own_logits(x_MH, ids_MS)
        everything = own_MS.new_full((len(own_MS), len(self.weight)), float("-inf"))
        return everything.scatter_(1, ids_MS, own_MS)

    def _own_logits(self, x_MH: torch.Tensor, ids_MS: torch.Tensor) -> torch.Tensor:
        if self.in_turn:
            return torch.stack([self.weight[ids] @ x for x, ids in zip(x_MH, ids_MS, strict=True)])
        if self.whole is not None or ids_MS.numel() >= len(self.weight):  # so many rows read as much as all tokens do
            return (self.whole or F.linear)(x_MH, self.weight, None).gather(1, ids_MS)
        return (self.weight[ids_MS] @ x_MH[:, :, None])[:, :, 0]
