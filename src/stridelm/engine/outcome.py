"""The only data that the host reads from the device in a step: the verdict, as plain lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stridelm.upload import Download, Mark


@dataclass(frozen=True, slots=True)
class Outcome:
    """A Verdict on the host, one entry per span."""

    tokens: list[list[int]]
    kept: list[int]
    drafted: list[int]
    accepted: list[int]
    reached: list[int]
    reals: list[int]
    sources: list[int]
    """Which of its drafter's sources each draft came from."""


class Reading:
    """A verdict on its way to the host: the copy starts on construction, and `outcome` waits for it."""

    def __init__(self, table: torch.Tensor) -> None:
        """table: as `StepOps.commit` returns it."""
        # On a CPU, the next replay of a captured step overwrites its table.
        self._table = Download(table if table.is_cuda else table.clone())

    @property
    def arrived(self) -> Mark:
        """When the step has ended, and `outcome` need not wait."""
        return self._table.arrived

    def outcome(self) -> Outcome:
        table = self._table.values()
        counts, kept, drafted, accepted, reached, reals, sources = table[:, :7].T.tolist()
        tokens = [row[:count] for row, count in zip(table[:, 7:].tolist(), counts, strict=True)]
        return Outcome(tokens, kept, drafted, accepted, reached, reals, sources)
