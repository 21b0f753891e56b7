"""Prompt lookup: what followed the last time the text ended like this (Saxena 2023, "Prompt Lookup Decoding").

The longest suffix of the known tokens, between `prompt_lookup_min` and `prompt_lookup_max` tokens, that occurs earlier
in them; of several occurrences the latest. The tokens behind it are the draft.
"""

from __future__ import annotations

import torch

from stridelm.draft.base import Drafter, Group, chain, per_span, within_bounds
from stridelm.params import Speculation
from stridelm.types import CANDIDATE, MAX_DRAFT_ROWS, Draft

MIN_MATCH, MAX_MATCH = 2, 8


class NgramDrafter(Drafter):
    name = "ngram"
    options = frozenset({"prompt_lookup_min", "prompt_lookup_max"})
    default_depth = 4

    def ladder(self, speculation: Speculation) -> tuple[int, ...]:
        depth = self.default_depth if speculation.depth is None else speculation.depth
        if depth > MAX_DRAFT_ROWS:
            raise ValueError(f"depth {depth} is over {MAX_DRAFT_ROWS}, the most rows a draft may have; lower it")
        shortest, longest = _lengths(speculation)
        if not 1 <= shortest <= longest:
            raise ValueError(f"prompt_lookup_min {shortest} must be at least 1 and at most prompt_lookup_max {longest}")
        return tuple(range(depth + 1))

    def propose(self, group: Group) -> Draft:
        width = max(span.draft for span in group.spans)
        device = group.slots.device
        # The CPU knows a bound on every length, so only that much of the table is searched.
        reach = max(span.start + span.real for span in group.spans)
        tokens = group.table.tokens[group.slots, :reach]
        known = group.table.known[group.slots]
        lengths = [_lengths(span.request.speculation) for span in group.spans]
        shortest, longest = (per_span(column, device) for column in zip(*lengths, strict=True))
        place, found = _latest_longest(tokens, known, shortest, longest, max(n[1] for n in lengths))
        index = place[:, None] + 1 + torch.arange(width, device=device)
        live = found[:, None] & (index < known[:, None]) & within_bounds(group, width)
        drafted = tokens.gather(1, index.clamp(max=reach - 1))
        return chain(width, CANDIDATE, device).draft(drafted, live)


def _lengths(speculation: Speculation) -> tuple[int, int]:
    shortest, longest = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    return MIN_MATCH if shortest is None else shortest, MAX_MATCH if longest is None else longest


def _latest_longest(
    tokens_RL: torch.Tensor, known: torch.Tensor, shortest: torch.Tensor, longest: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the best earlier occurrence of each row's suffix ends, and whether there is one.

    known, shortest, longest: [R]; most: the largest of `longest`. Returns ([R] index, [R] bool).
    """
    rows, length = tokens_RL.shape
    place = torch.arange(length, device=tokens_RL.device)
    run = (place < known[:, None] - 1).to(torch.int64)  # still matching, candidates end before the last token
    matched = torch.zeros(rows, length, dtype=torch.int64, device=tokens_RL.device)
    for back in range(min(most, length)):
        suffix = tokens_RL.gather(1, (known[:, None] - 1 - back).clamp(min=0))
        shifted = torch.roll(tokens_RL, back, 1) == suffix
        run = run * (shifted & (place >= back) & (back < longest)[:, None])
        matched += run
    best = (matched * length + place).argmax(1)  # longest first, then latest
    return best, matched.gather(1, best[:, None])[:, 0] >= shortest
