"""Prompt lookup: what followed the last time the text ended like this (Saxena 2023, "Prompt Lookup Decoding").

The longest suffix of the known tokens, between a shortest and a longest length, that occurs earlier in them; of several
occurrences the latest. The tokens behind it are the guess.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stridelm.draft.base import Group, per_span, within_bounds
from stridelm.params import Speculation


def match_lengths(speculation: Speculation, shortest: int, longest: int) -> tuple[int, int]:
    """What a request asked for, or else these. Raises ValueError for lengths that no match can have."""
    if speculation.prompt_lookup_min is not None:
        shortest = speculation.prompt_lookup_min
    longest = max(shortest, longest) if speculation.prompt_lookup_max is None else speculation.prompt_lookup_max
    if not 1 <= shortest <= longest:
        raise ValueError(f"prompt_lookup_min {shortest} must be at least 1 and at most prompt_lookup_max {longest}")
    return shortest, longest


def lookup(group: Group, lengths: Sequence[tuple[int, int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([R, width] int64 guesses, bool which of them there are).

    lengths: shortest and longest suffix that counts, of each request.
    """
    device, table = group.slots.device, group.table
    # The CPU knows a bound on every length, so only that much of the table is searched.
    reach = max(span.start + span.real for span in group.spans)
    shortest, longest = (per_span(column, device) for column in zip(*lengths, strict=True))
    if group.slots.is_cuda:
        from stridelm.kernels.lookup import followers

        bounds = per_span([span.draft for span in group.spans], device)
        return followers(group.slots, table.known, table.tokens, shortest, longest, bounds, reach, width)
    tokens, known = table.tokens[group.slots, :reach], table.known[group.slots]
    place, found = _latest_longest(tokens, known, shortest, longest, max(most for _, most in lengths))
    index = place[:, None] + 1 + torch.arange(width, device=device)
    valid = found[:, None] & (index < known[:, None]) & within_bounds(group, width)
    return tokens.gather(1, index.clamp(max=reach - 1)), valid


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
