"""Captured steps where nothing can be captured: a replay runs the step again, from the inputs that a graph would read,
into the tensors that it would fill."""

from __future__ import annotations

from collections.abc import Callable

from stridelm.engine.device_step import Run
from stridelm.engine.engine import Engine
from stridelm.types import Draft


class Replay:
    """What a CUDA graph is to the engine."""

    def __init__(self, body: Callable[[], Run | Draft], left: Run | Draft) -> None:
        self._body, self.left = body, left
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        again = self._body()
        if isinstance(self.left, Run) and isinstance(again, Run):  # what is proposed is copied by the body
            self.left.table.copy_(again.table)


class ReplayPool:
    """What `GraphPool` is, without memory of its own."""

    def __init__(self) -> None:
        self.made: list[Replay] = []

    def capture(self, body: Callable[[], Run | Draft], inputs: int = 0) -> tuple[Replay, Run | Draft]:
        self.made.append(Replay(body, body()))
        return self.made[-1], self.made[-1].left


def replays(engine: Engine) -> ReplayPool:
    """Have the engine run whole steps as captured ones, as far as they are of a kind that can be."""
    pool = ReplayPool()
    engine.capture_into(pool, None)  # type: ignore[arg-type]
    return pool
