"""Prompt lookup: guess what followed the last time that the text ended as it does now (Saxena 2023, "Prompt Lookup
Decoding").

The match is the longest suffix of the known tokens, within length limits, that also occurs earlier in them; of several
occurrences the latest counts. The tokens after it are the guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stridelm.draft.base import Group, per_span
from stridelm.draft.options import LookupOptions

if TYPE_CHECKING:
    from stridelm.run.state import TokenTable


def match_lengths(asked: LookupOptions, shortest: int, longest: int) -> tuple[int, int]:
    """The lengths that a request asks for, or these defaults. Raises ValueError for lengths that no match can have."""
    if asked.prompt_lookup_min is not None:
        shortest = asked.prompt_lookup_min
    longest = max(shortest, longest) if asked.prompt_lookup_max is None else asked.prompt_lookup_max
    if not 1 <= shortest <= longest:
        raise ValueError(f"prompt_lookup_min {shortest} must be at least 1 and at most prompt_lookup_max {longest}")
    return shortest, longest


def lookup(
    group: Group, lengths: Sequence[tuple[int, int]], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """([R, width] int64 guesses, [R, width] bool whether each exists, [R] int64 length of the match).

    lengths: shortest and longest suffix that counts as a match, for each request.
    """
    # The host knows a bound on every length, so only that much of the table is searched.
    reach = max(span.start + span.real for span in group.spans)
    return Lookup.of(group.slots, lengths, [span.draft for span in group.spans], width).results(group.table, reach)


@dataclass(frozen=True)
class Lookup:
    """What to look up for R requests, whatever their tokens are by now."""

    slots: torch.Tensor
    """[R] int64, as all of these: rows of the request table."""
    shortest: torch.Tensor
    longest: torch.Tensor
    bounds: torch.Tensor
    """Most guesses."""
    width: int
    """The largest bound."""

    @classmethod
    def of(
        cls, slots: torch.Tensor, lengths: Sequence[tuple[int, int]], bounds: Sequence[int], width: int | None = None
    ) -> Lookup:
        """lengths: shortest and longest suffix that counts as a match, for each request."""
        shortest, longest = (per_span(column, slots.device) for column in zip(*lengths, strict=True))
        return cls(slots, shortest, longest, per_span(bounds, slots.device), max(bounds) if width is None else width)

    def results(self, table: TokenTable, reach: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As of `lookup`. reach: a bound on every request's known tokens."""
        asked = self.shortest, self.longest, self.bounds
        return table.ops.followers(self.slots, table.known, table.tokens, *asked, reach, self.width)
