"""Where a checkpoint's tensors go in a model, and which share of them belongs here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from stridelm.parallel.shard import Shard


@dataclass(frozen=True)
class Split:
    """Number `rank` of `world` equal shares of a tensor along a dimension: of a matrix, rows (0) are its output
    features and columns (1) its input features."""

    dim: int = 0
    rank: int = 0
    world: int = 1

    @classmethod
    def rows(cls, shard: Shard) -> Split:
        return cls(0, shard.rank, shard.world)

    @classmethod
    def columns(cls, shard: Shard) -> Split:
        return cls(1, shard.rank, shard.world)

    def share(self, dim: int, size: int) -> int:
        """How much of a dimension of `size` is here. Raises ValueError if the shares would not be equal."""
        if dim != self.dim:
            return size
        if size % self.world:
            raise ValueError(f"{size} features cannot be cut into {self.world} equal shares")
        return size // self.world

    def whole(self, shape: torch.Size) -> torch.Size:
        """The shape of that of which a share has `shape`."""
        return torch.Size(size * self.world if dim == self.dim else size for dim, size in enumerate(shape))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of what is here of a whole tensor."""
        size = tensor.shape[self.dim] // self.world
        return tensor.narrow(self.dim, self.rank * size, size)


WHOLE = Split()


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint's tensor, or a share of it, goes: rows `start` to `stop` of the parameter `name`."""

    name: str
    start: int
    stop: int
    split: Split = WHOLE


Slots = Iterator[tuple[str, WeightSlot]]
"""Names in a checkpoint, each with its slot."""


class ModelPart(nn.Module):
    """Base of what models and heads are made of: each says what checkpoints hold of it, and of its children what they
    say themselves."""

    keeps_bits: ClassVar[bool] = False
    """It promises that a row's bits do not depend on the rows beside it, if its children and the `ops` that it is given
    keep that promise. What does not promise it is refused where it is asked for (linear.set_products)."""

    def slots(self, theirs: str = "") -> Slots:
        """theirs: the prefix that a checkpoint gives it. Names of slots are relative to the module."""
        raise NotImplementedError

    def _own(self, name: str, theirs: str) -> Slots:
        """The slot of a parameter that a checkpoint holds as one tensor, called `theirs`."""
        yield theirs, WeightSlot(name, 0, self.get_parameter(name).shape[0])

    def _inner(self, name: str, theirs: str) -> Slots:
        """The slots of the child `name`, as this module names them."""
        child = self.get_submodule(name)
        assert isinstance(child, ModelPart)
        for stored, slot in child.slots(theirs):
            yield stored, replace(slot, name=f"{name}.{slot.name}")
