"""The running requests' tokens, on the device.

History is read from here and nowhere else: drafters look tokens up, penalties count them, the batch takes its ids.
Nothing is kept incrementally beside it that could disagree.
"""

from __future__ import annotations

import torch

from stridelm.types import MAX_DRAFT_ROWS

SLACK = MAX_DRAFT_ROWS + 1
"""Tokens that one step may emit beyond the context before the CPU cuts them."""


class TokenTable:
    """tokens [S, L] int64 and known [S] int64, one row a slot; L leaves room for a step's overrun."""

    def __init__(self, slots: int, max_length: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, max_length + SLACK, dtype=torch.int64, device=device)
        self.known = torch.zeros(slots, dtype=torch.int64, device=device)

    def admit(self, slot: int, ids: list[int]) -> None:
        """Write a request's prompt, and its output so far if it comes back from preemption."""
        self.tokens[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self.known[slot] = len(ids)

    def append(self, slots_R: torch.Tensor, tokens_RK: torch.Tensor, counts_R: torch.Tensor) -> None:
        """Add each request's first `counts` tokens behind its known ones."""
        width = tokens_RK.shape[1]
        offset = torch.arange(width, device=tokens_RK.device)
        column = self.known[slots_R][:, None] + offset
        # Beyond the count the old contents are written back.
        row = slots_R[:, None]
        fresh = offset < counts_R[:, None]
        self.tokens[row, column] = torch.where(fresh, tokens_RK, self.tokens[row, column])
        self.known.index_add_(0, slots_R, counts_R)
