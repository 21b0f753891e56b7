"""Drafting by prompt lookup (draft/lookup.py), with suffixes of `prompt_lookup_min` to `prompt_lookup_max` tokens."""

from __future__ import annotations

from stridelm.draft.base import Drafter, Group, chain
from stridelm.draft.lookup import lookup, match_lengths
from stridelm.draft.options import LookupOptions
from stridelm.params import Speculation
from stridelm.types import CANDIDATE, Draft

MIN_MATCH, MAX_MATCH = 2, 8


class NgramDrafter(Drafter):
    name = "ngram"
    default_depth = 4

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        depth = self.depth_of(speculation)
        _lengths(speculation)
        return tuple(range(depth + 1))

    def propose(self, group: Group) -> Draft:
        width = max(span.draft for span in group.spans)
        tokens, valid, _ = lookup(group, [_lengths(span.request.speculation) for span in group.spans], width)
        return group.arena.keep(chain, width, CANDIDATE).draft(tokens, valid)


def _lengths(speculation: Speculation) -> tuple[int, int]:
    return match_lengths(speculation.read(LookupOptions), MIN_MATCH, MAX_MATCH)
