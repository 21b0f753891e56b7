"""Which share of a model a rank has.

Attention is cut by heads and an MLP by its inner width: the matrices in front by their output features, the one after
by its input features, so that a layer needs one sum over the ranks for each (Shoeybi et al. 2019, arXiv 1909.08053,
section 3). Every rank runs the same step on the same plan, and what is not cut is the same on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """Share `rank` of `world` equal ones. With one it is the whole model; several need a `sum` of their own."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world

    def of(self, name: str, count: int) -> int:
        """How many of `count` heads or features are here. Raises ValueError if the shares would not be equal."""
        if count % self.world:
            raise ValueError(f"{name} {count} cannot be cut into {self.world} equal shares")
        return count // self.world

    def sum(self, x_NH: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, added in the order of ranks whatever its size: a row's bits depend on that row
        alone. x may be overwritten."""
        assert self.world == 1
        return x_NH


ONE = Shard()
