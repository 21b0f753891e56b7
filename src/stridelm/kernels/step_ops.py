"""What a step does to tensors beyond the model, as one interface with several implementations.

Requests, spans and tables are not known here: a room hands over the tensors of its objects. An operation is the same
one in every implementation, to the bit where it says nothing else, so that a step on a GPU says what a step on a CPU
says. Where a slot is negative the row is padding: nothing of the tables is written for it, and what is returned for it
may be anything that is no index out of bounds.

Legend: R spans or requests, N rows, W draft rows of a span, K = W + 1 nodes of a span (the last real row, then the
draft rows), M = R K decision rows, S slots of the request tables (the last is nobody's), L columns of the token table,
P pages of a table, B spans of a whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from stridelm.types import Draft

Move = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies slots source[i] to target[i], int64 each, in all tensors that it was made for."""


class StepOps(Protocol):
    """All integers are int64 if nothing else is said."""

    # Where rows lie

    def lay_out(
        self,
        slots_R: torch.Tensor,
        known_S: torch.Tensor,
        committed_S: torch.Tensor,
        tokens_SL: torch.Tensor,
        pages_SP: torch.Tensor,
        firsts_R: torch.Tensor,
        reals_R: torch.Tensor,
        drafts_R: torch.Tensor,
        decides_R: torch.Tensor,
        span_N: torch.Tensor,
        offset_N: torch.Tensor,
        draft: Draft,
        longest: int,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find a step's rows: ([5, N] ids, positions, pool slots, ancestors, draft rows; [4, R] int32 firsts, counts,
        starts, reals; [2, M] decision rows, decision index). Fields of ForwardBatch and DeviceGeometry.

        firsts_R, reals_R, drafts_R: where each span's rows begin, and the most real and draft rows that it has.
        decides_R: bool. span_N, offset_N: whose each row is, and its place among those. longest: most rows of a span.
        pages_SP: int32. The draft's rows stand side by side in each of its tensors.
        """
        ...

    def place(
        self,
        slots_R: torch.Tensor,
        starts_R: torch.Tensor,
        counts_R: torch.Tensor,
        stays_R: torch.Tensor | None,
        tables: dict[str, torch.Tensor],
        firsts_R: torch.Tensor,
        span_N: torch.Tensor,
        offset_N: torch.Tensor,
        longest: int,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Find `counts` rows of each request from storage index `starts` on, 0 if that is below: ([N] storage indices,
        [N] places relative to the end, page group -> [N] pool slots, [2, R] int32 counts and starts, [R] last rows).

        stays_R: bool, whose rows leave entries; None: everybody's. tables: page group -> [S, P] int32. The others as
        for `lay_out`.
        """
        ...

    def sources(
        self,
        indices_R: torch.Tensor,
        span_N: torch.Tensor,
        offset_N: torch.Tensor,
        tailed_R: torch.Tensor,
        firsts_B: torch.Tensor,
        reals_B: torch.Tensor,
        path_BW: torch.Tensor,
        index_BK: torch.Tensor,
        decisions_M: torch.Tensor,
        step_rows: int,
    ) -> torch.Tensor:
        """[N] rows of a step of B requests: of each of the R that are named, behind a tail of rows that stand for none
        (any row is given), its real rows and then those of the path that was accepted."""
        ...

    def advance(self, lengths_S: torch.Tensor, slots_R: torch.Tensor, rows_R: torch.Tensor) -> None:
        """Add to each request's length, in place. slots_R: no two alike but for padding, which adds nothing."""
        ...

    def mover(self, tensors: Sequence[torch.Tensor]) -> Move:
        """What moves entries within tensors [slots, ...] that share their slots. Make it once: a captured launch reads
        what is made here at every replay.

        A move is as if all were read before any is written. No two targets are the same but in pairs (0, 0), which may
        stand anywhere, and no entry may read what one before it writes. Paths that move down keep this rule if each
        request's entries stand in order: entry d comes from storage index base + path[d] >= base + d and goes to base +
        d, and all entries before it went lower.
        """
        ...

    # Drafting

    def followers(
        self,
        slots_R: torch.Tensor,
        known_S: torch.Tensor,
        tokens_SL: torch.Tensor,
        shortest_R: torch.Tensor,
        longest_R: torch.Tensor,
        bounds_R: torch.Tensor,
        reach: int,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([R, W] guesses, bool which of them there are): what followed the last time that the text ended like this.

        The longest suffix of the known tokens, between a shortest and a longest length, that occurs earlier in them; of
        several occurrences the latest. The tokens behind it are the guess, at most so many as the bounds say.
        reach: a bound on every request's known tokens.
        """
        ...
