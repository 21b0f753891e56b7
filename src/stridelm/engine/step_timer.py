"""How long the device takes for each part of a step: for benchmarks, not for serving."""

from __future__ import annotations

import torch

PARTS = ("draft", "forward", "sampling")
"""draft: proposing (but not on the host), building the batch and observing. forward: the model. sampling: everything
from logits to commit."""


class StepTimer:
    """Events between the parts of one step. A captured step records them again in every replay. A no-op unless
    `timed`."""

    def __init__(self, timed: bool) -> None:
        self.timed = timed
        self._events: list[tuple[str, torch.cuda.Event]] | None = [] if timed else None
        self.end("start")

    def end(self, part: str) -> None:
        """Attribute the device work launched since the last call to `part`."""
        if self._events is not None:
            event = torch.cuda.Event(enable_timing=True, external=True)
            event.record()
            self._events.append((part, event))

    def add_to(self, times: dict[str, float]) -> None:
        """Add the step's milliseconds to those of each part. The step must have ended."""
        if not self._events:
            return
        torch.cuda.synchronize()
        for (_, before), (part, after) in zip(self._events, self._events[1:]):
            times[part] = times.get(part, 0.0) + before.elapsed_time(after)
