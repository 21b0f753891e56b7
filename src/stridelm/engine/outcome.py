"""The CPU's one look at the device in a step: the verdict as plain lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stridelm.types import Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """A Verdict on the host, one entry a span."""

    tokens: list[list[int]]
    kept: list[int]
    drafted: list[int]
    accepted: list[int]
    reached: list[int]


def read(verdict: Verdict) -> Outcome:
    """Copy what the CPU needs of a verdict, in one transfer."""
    columns = (verdict.counts, verdict.kept, verdict.drafted, verdict.accepted, verdict.reached)
    table = torch.cat((torch.stack(columns, 1), verdict.tokens), 1).tolist()
    return Outcome(
        tokens=[row[5 : 5 + row[0]] for row in table],
        kept=[row[1] for row in table],
        drafted=[row[2] for row in table],
        accepted=[row[3] for row in table],
        reached=[row[4] for row in table],
    )
