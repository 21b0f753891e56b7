"""Rows of logits from which tokens are drawn, and the token history of each.

Nothing is carried over between steps: a history is read from the token table each time, so a rejected draft, a
preemption or another order of steps leaves nothing behind.

Legend: M rows, S slots, L columns of the token table, E extra tokens per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class TokenHistory(Protocol):
    """The tokens of the running requests, on the device."""

    tokens: torch.Tensor
    """[S, L] int64: prompt, then output."""
    known: torch.Tensor
    """[S] int64: how many of them are real."""


@dataclass(slots=True)
class Rows:
    """Rows of logits from which tokens are drawn, and the token history of each.

    The history of row m is `tokens[slots[m], :known]`, then the entries of `extra[m]` that are not -1.
    """

    slots: torch.Tensor
    """[M] int64: the row's request in the tables."""
    positions: torch.Tensor
    """[M] int64: absolute position of the token to be drawn, which is the length of the row's history."""
    extra: torch.Tensor | None = None
    """[M, E] int64: tokens after the known ones that lead to this row (candidate ancestors, or tokens drawn
    earlier in a trusted window), in order, padded at the end with -1."""
    longest: int | None = None
    """An upper bound on `known` in these slots, from the host: the token table is not read beyond it."""
    path: Callable[[int], list[int] | None] | None = None
    """What the host knows of `extra`, if it has read all tokens that are known: row -> its extra tokens, None for a row
    whose token is not needed."""

    def select(self, index: torch.Tensor | None) -> Rows:
        """Only the rows at `index`; None: all."""
        if index is None:
            return self
        extra = None if self.extra is None else self.extra.index_select(0, index)
        return Rows(self.slots.index_select(0, index), self.positions.index_select(0, index), extra, self.longest)


def check_rows(rows: Rows, history: TokenHistory) -> None:
    """Assert that positions, known lengths and extras agree. Reads the device: for strict mode and tests."""
    known_M = history.known[rows.slots]
    real_M = torch.zeros_like(known_M)
    if rows.extra is not None:
        live_ME = rows.extra >= 0
        real_M = live_ME.sum(1)
        assert bool((live_ME.long().diff(dim=1) <= 0).all()), "extra tokens are not padded at the end"
    assert torch.equal(rows.positions - known_M, real_M), "a row's position is not the length of its history"
    assert rows.longest is None or bool((known_M <= rows.longest).all()), "a history is longer than `longest`"
