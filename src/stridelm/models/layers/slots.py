"""Where a checkpoint's tensors go in a model, and which share of each a tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from stridelm.kernels.row_forms import RowForm
from stridelm.parallel.shard import Shard


@dataclass(frozen=True)
class Split:
    """Share number `rank` of `world` equal shares of a tensor along a dimension. For a matrix, dimension 0 (rows) is
    its output features and dimension 1 (columns) its input features."""

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
        """The share of a dimension of `size`. Raises ValueError if the shares would not be equal."""
        if dim != self.dim:
            return size
        if size % self.world:
            raise ValueError(f"{size} features cannot be cut into {self.world} equal shares")
        return size // self.world

    def whole(self, shape: torch.Size) -> torch.Size:
        """The shape of the whole tensor if a share has `shape`."""
        return torch.Size(size * self.world if dim == self.dim else size for dim, size in enumerate(shape))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this share of a whole tensor."""
        begin, end = self.bounds(tensor.shape[self.dim])
        return tensor.narrow(self.dim, begin, end - begin)

    def bounds(self, size: int) -> tuple[int, int]:
        """Where this share of `size` features begins and ends."""
        share = size // self.world
        return self.rank * share, (self.rank + 1) * share


WHOLE = Split()


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint's tensor, or a share of it, goes: rows `start` to `stop` of the parameter `name`."""

    name: str
    start: int
    stop: int
    split: Split = WHOLE
    repeat: int = 1
    """How many of those rows each row of the tensor fills; the last one fills what is left. Such a tensor is whole."""
    stacked: int = 0
    """How many matrices the tensor holds, along a first dimension of its own; 0: it is a matrix or a vector."""
    parts: int = 1
    """How many matrices of equal size lie one below the other in those rows: each is split for itself."""

    @property
    def cuts_files(self) -> bool:
        """Whether the share is one run of the tensor along a dimension, so that nothing else need be read."""
        return self.split.world > 1 and not self.stacked

    def stored_shape(self, filled: torch.Size) -> torch.Size:
        """The shape of the checkpoint's tensor, from that of the rows to be filled."""
        assert self.repeat == 1 or self.split.world == 1
        whole = self.split.whole(torch.Size((-(-filled[0] // self.repeat), *filled[1:])))
        return torch.Size((self.stacked, whole[0] // self.stacked, *whole[1:])) if self.stacked else whole

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows to be filled, from the checkpoint's tensor."""
        if self.stacked:
            matrices = tensor.flatten(0, 1).chunk(self.parts)
            return torch.cat([self.split.of(matrix) for matrix in matrices])
        share = self.split.of(tensor)
        return share if self.repeat == 1 else share.repeat_interleave(self.repeat, 0)[: self.stop - self.start]


Slots = Iterator[tuple[str, WeightSlot]]
"""Tensor names in a checkpoint, each with its slot."""


class ModelPart(nn.Module):
    """Base of the modules that models and heads are made of. Each lists its own tensors in a checkpoint and asks its
    children for theirs."""

    keeps_bits: ClassVar[bool] = False
    """Whether it guarantees that a row's bits do not depend on the rows beside it, provided that its children and the
    `ops` passed to it do. Modules without the guarantee are refused if it is required (linear.set_products)."""
    reads_dense: ClassVar[bool] = False
    """Whether it also reads rows of its `row_form` as they were before they were quantised."""

    @property
    def row_form(self) -> RowForm | None:
        """The form in which its rows may also be passed to it; None: only dense."""
        return None

    def slots(self, theirs: str = "") -> Slots:
        """theirs: the module's prefix in the checkpoint. Names in slots are relative to the module."""
        raise NotImplementedError

    def kept(self) -> list[nn.Parameter]:
        """Its own parameters whose dtype is fixed; the others take the model's."""
        return []

    def _own(self, name: str, theirs: str) -> Slots:
        """The slot of a parameter that is one tensor in the checkpoint, called `theirs`."""
        yield theirs, WeightSlot(name, 0, self.get_parameter(name).shape[0])

    def _inner(self, name: str, theirs: str) -> Slots:
        """The slots of the child `name`, with names relative to this module."""
        child = self.get_submodule(name)
        assert isinstance(child, ModelPart)
        for stored, slot in child.slots(theirs):
            yield stored, replace(slot, name=f"{name}.{slot.name}")
