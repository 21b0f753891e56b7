"""Captured steps on a device that cannot capture: a replay runs the step again, from the inputs that a graph would
read, into the tensors that it would fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from stridelm.batch import Draft, States
from stridelm.engine.device_step import Run
from stridelm.engine.engine import Engine
from stridelm.engine.introspect import Readable

Left = Run | Draft | States
"""What a captured body leaves behind."""


class Replay:
    """Stands in for a CUDA graph."""

    def __init__(self, body: Callable[[], Left], left: Left) -> None:
        self._body, self.left = body, left
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        again = self._body()
        if isinstance(self.left, Run) and isinstance(again, Run):  # the body itself copies what is proposed
            self.left.table.copy_(again.table)
            assert self.left.readable is not None and again.readable is not None
            for name, tensor in _tensors(again.readable):
                getattr(self.left.readable, name).copy_(tensor)
        if isinstance(self.left, States) and isinstance(again, States):
            self.left.final.copy_(again.final)
            for layer, tensor in again.inputs.items():
                self.left.inputs[layer].copy_(tensor)


def _tensors(readable: Readable) -> list[tuple[str, torch.Tensor]]:
    values = [(each.name, getattr(readable, each.name)) for each in fields(readable)]
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]


class ReplayPool:
    """Stands in for `GraphPool`, without memory of its own."""

    budget = spent = 0

    def __init__(self) -> None:
        self.made: list[Replay] = []
        self.graphs = 0

    def capture(self, body: Callable[[], Left], inputs: int = 0) -> tuple[Replay, Left]:
        self.made.append(Replay(body, body()))
        self.graphs += 1
        return self.made[-1], self.made[-1].left

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def replays(engine: Engine) -> ReplayPool:
    """Make the engine replay whole steps, as far as they are of a kind that can be captured."""
    pool = ReplayPool()
    engine.capture_into(pool, None)  # type: ignore[arg-type]
    return pool
