"""An output head that computes the logits of few tokens: those that a row's best centroids stand for.

The vocabulary is divided into equal parts, each with a centroid; which tokens are whose is a list of its own. A row is
compared with all centroids, and only the tokens of the best have logits. All others have none at all, where
transformers gives them one below the lowest, which a sampled guess could be.

Legend: M rows, H hidden width, V tokens, C centroids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from stridelm.kernels.ops import Ops
from stridelm.models.layers.linear import Linear
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

    def forward(self, x_MH: torch.Tensor, ops: Ops) -> torch.Tensor:
        """[M, V]; -inf for tokens of other centroids."""
        return ops.part_logits(x_MH, self.scores(x_MH), self.weight, self.ids, self.centroids.best)
