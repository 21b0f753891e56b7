"""Drafting by prompt lookup (draft/lookup.py), with suffixes of `prompt_lookup_min` to `prompt_lookup_max` tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stridelm.batch import CANDIDATE, Draft
from stridelm.draft.base import Drafter, Group, TargetInfo, chain
from stridelm.draft.lookup import Lookup, lookup, match_lengths
from stridelm.draft.options import LookupOptions
from stridelm.params import Speculation
from stridelm.sample.sampler import Sampler
from stridelm.types import Found, Request
from stridelm.upload import upload

if TYPE_CHECKING:
    from stridelm.run.heads import TargetRuntime
    from stridelm.run.state import TokenTable

MIN_MATCH, MAX_MATCH = 2, 8


class NgramDrafter(Drafter):
    name = "ngram"
    default_depth = 4
    looks_ahead = True

    def __init__(self, target: TargetInfo, sampler: Sampler, runtime: TargetRuntime | None = None) -> None:
        super().__init__(target, sampler, runtime)
        self._latest: tuple[Sequence[Request], Sequence[int], Lookup | None] = [], [], None
        """For whom it looked last, their slots, and what: most steps are for the same requests as the one before."""

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        depth = self.depth_of(speculation)
        _lengths(speculation)
        return tuple(range(depth + 1))

    def found(self, requests: Sequence[Request], table: TokenTable) -> Sequence[Found]:
        """The evidence is the length of the match."""
        slots = [request.slot for request in requests]
        *same, asked = self._latest
        if asked is None or same != [requests, slots]:
            lengths = [_lengths(request.speculation) for request in requests]
            bounds = [len(request.rows_by_depth) - 1 for request in requests]
            asked = Lookup.of(upload(slots, table.tokens.device), lengths, bounds)
            self._latest = requests, slots, asked
        _, exists, matched = asked.results(table, max([request.known for request in requests]))
        return list(map(Found, exists.sum(1).tolist(), matched.tolist()))

    def leave(self, request: Request) -> None:
        self._latest = [], [], None

    def propose(self, group: Group) -> Draft:
        width = max(span.draft for span in group.spans)
        tokens, valid, _ = lookup(group, [_lengths(span.request.speculation) for span in group.spans], width)
        return group.arena.keep(chain, width, CANDIDATE).draft(tokens, valid)


def _lengths(speculation: Speculation) -> tuple[int, int]:
    return match_lengths(speculation.read(LookupOptions), MIN_MATCH, MAX_MATCH)
