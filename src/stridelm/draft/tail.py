"""What a head takes of each request's newest rows and has to read once more, or has not read yet.

Modules that are applied in turn compute the entries of the last rows again once their tokens are known. And while
nothing is drafted rows may wait, so that one pass computes the entries of several.

Legend: S slots, R requests, N rows of a catch-up, W numbers taken of a row, P most rows that may be kept.
"""

from __future__ import annotations

import torch

from stridelm.run.heads import HeadRows


class Tail:
    def __init__(
        self, slots: int, again: int, patience: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """again: rows that are read once more. patience: most rows that may wait besides."""
        self.again = again
        self._taken = torch.zeros(slots, again + patience, width, dtype=dtype, device=device)
        """[S, P, W] in order."""
        self._rows = torch.zeros(slots, dtype=torch.int64, device=device)
        """[S] how many there are."""

    @property
    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, P, W] what was taken of the rows, in order, and [S] how many there are."""
        return self._taken, self._rows

    def clear(self, slot: int) -> None:
        self._rows[slot].fill_(0)

    def first(self, slots_R: torch.Tensor, rows: HeadRows, taken_NW: torch.Tensor) -> torch.Tensor:
        """[N, W] what was taken of a catch-up's rows, of which each request's first are kept here."""
        early_N = rows.offset_N < self._rows[slots_R][rows.span_N]
        column_N = rows.offset_N.clamp(max=self._taken.shape[1] - 1)
        return torch.where(early_N[:, None], self._taken[slots_R[rows.span_N], column_N], taken_NW)

    def keep(self, slots_R: torch.Tensor, rows: HeadRows, taken_NW: torch.Tensor, counts_R: torch.Tensor) -> None:
        """After a catch-up of `counts` rows of each request: keep those that are read once more."""
        self._rows[slots_R] = counts_R = counts_R.clamp(max=self.again)
        if self.again:
            place_A = torch.arange(1, self.again + 1, device=counts_R.device)
            at_RA = (rows.last_R - counts_R)[:, None] + place_A
            self._taken[slots_R, : self.again] = taken_NW[at_RA.clamp(0, len(taken_NW) - 1)]
