"""The only data that the host reads from the device in a step: the verdict, as plain lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stridelm.batch import Verdict
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


def tabulate(verdict: Verdict, reals_R: torch.Tensor, sources_R: torch.Tensor | None) -> torch.Tensor:
    """[R, 7 + K] int64: what the host needs to know about a step, in one tensor. sources: of its draft."""
    sources_R = torch.zeros_like(reals_R) if sources_R is None else sources_R
    columns = (verdict.counts, verdict.kept, verdict.drafted, verdict.accepted, verdict.reached, reals_R, sources_R)
    return torch.cat((torch.stack(columns, 1), verdict.tokens), 1)


class Reading:
    """A verdict on its way to the host: the copy starts on construction, and `outcome` waits for it."""

    def __init__(self, table: torch.Tensor) -> None:
        """table: as made by `tabulate`."""
        # On a CPU, the next replay of a captured step overwrites its table.
        self._table = Download(table if table.is_cuda else table.clone())

    @property
    def arrived(self) -> Mark:
        """When the step has ended, and `outcome` need not wait."""
        return self._table.arrived

    def outcome(self) -> Outcome:
        table = self._table.values().tolist()
        return Outcome(
            tokens=[row[7 : 7 + row[0]] for row in table],
            kept=[row[1] for row in table],
            drafted=[row[2] for row in table],
            accepted=[row[3] for row in table],
            reached=[row[4] for row in table],
            reals=[row[5] for row in table],
            sources=[row[6] for row in table],
        )
