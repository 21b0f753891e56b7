"""Ranks that are threads of one process: each runs an engine of its own, and sums wait for all of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import TypeVar

import torch

from stridelm.parallel.shard import Shard

T = TypeVar("T")


@dataclass
class Meeting:
    """Where the ranks leave their summands."""

    world: int
    parts: list[torch.Tensor] = field(init=False)
    barrier: Barrier = field(init=False)
    sums: int = 0

    def __post_init__(self) -> None:
        self.parts = [torch.empty(0)] * self.world
        self.barrier = Barrier(self.world, timeout=60)


@dataclass(frozen=True)
class ThreadShard(Shard):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def sum(self, x_NH: torch.Tensor) -> torch.Tensor:
        meeting = self.meeting
        meeting.parts[self.rank] = x_NH
        meeting.barrier.wait()
        total = torch.zeros_like(x_NH)
        for part in meeting.parts:
            assert part.shape == x_NH.shape, "the ranks run different steps"
            total += part
        meeting.barrier.wait()  # before anyone overwrites its own
        meeting.sums += self.rank == 0
        return total


def on_each_rank(world: int, work: Callable[[ThreadShard], T]) -> tuple[list[T], int]:
    """What each rank's work returns, in order, and how many sums they took together. A rank that fails fails all."""
    meeting = Meeting(world)

    def run(rank: int) -> T:
        try:
            return work(ThreadShard(rank, world, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world))), meeting.sums
