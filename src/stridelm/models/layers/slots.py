"""Where a checkpoint's tensors go in a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint's tensor goes: rows `start` to `stop` of the parameter `name`."""

    name: str
    start: int
    stop: int


Slots = Iterator[tuple[str, WeightSlot]]
"""Names in a checkpoint, each with its slot."""


class ModelPart(nn.Module):
    """Base of what models and heads are made of: each says what checkpoints hold of it, and of its children what they
    say themselves."""

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
