"""The tokens that lead to each draft row: on the device, where penalties read them, and on the host, where grammars are
matched along them."""

from __future__ import annotations

import torch

from stridelm.batch import Draft
from stridelm.sample.table import SamplingTable
from stridelm.types import Span
from stridelm.upload import Download


class DraftPaths:
    """The tokens that lead to each draft row of a step. Their copy starts on construction, so that the host can match
    grammars while the device runs the forward pass."""

    def __init__(self, spans: tuple[Span, ...], draft: Draft) -> None:
        self._spans = spans
        self._candidates = draft.candidates
        self._fields: Download | None = None
        if draft.width:
            self._fields = Download(torch.stack((draft.tokens, draft.ancestors, draft.valid.to(torch.int64))))

    @classmethod
    def of(cls, spans: tuple[Span, ...], draft: Draft, table: SamplingTable) -> DraftPaths | None:
        """None if no request that decides has a grammar."""
        guided = any(span.decides and table.guide(span.request.slot) for span in spans)
        return cls(spans, draft) if guided else None

    def to(self, span: int, row: int) -> list[int] | None:
        """Tokens of the path to a draft row, its own included; empty for -1, the last real row. None if nothing is
        drawn there. Waits for the copy."""
        if not self._spans[span].decides:
            return None
        if row < 0:
            return []
        assert self._fields is not None
        tokens, ancestors, valid = self._fields.values()
        if not (self._candidates[span, row] and valid[span, row]):
            return None
        members = int(ancestors[span, row])
        return [int(tokens[span, each]) for each in range(row + 1) if members >> each & 1]


def candidate_history(draft: Draft, spans: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[m, E] tokens of each row's path through the draft, itself included, in order; -1 after the end.

    spans, own: [m] span and draft row (-1: the last real row, whose path is empty).
    """
    width, max_depth = draft.width, draft.max_depth
    masks = torch.where(own >= 0, draft.ancestors[spans, own.clamp(min=0)], 0)
    bits = torch.arange(width, device=own.device)
    member = ((masks[:, None] >> bits) & 1) == 1
    # What is not on the path, or lies deeper than any candidate, goes to a spare last column.
    column = torch.where(member, draft.depths[spans] - 1, max_depth)
    path = torch.full((own.shape[0], max_depth + 1), -1, dtype=torch.int64, device=own.device)
    return path.scatter_(1, column.clamp(max=max_depth), draft.tokens[spans])[:, :max_depth]
