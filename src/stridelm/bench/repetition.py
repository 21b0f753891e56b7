"""How much a continuation repeats itself. Looping text is easy to draft and flatters every drafter, so
acceptance is never reported without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GRAM = 4
SHORTEST = 16
"""Continuations of fewer tokens are too short to be put in a bucket."""
LOOP_ROUNDS, LOOP_TOKENS = 3, 24
"""A loop is a tail of at least this many repetitions of one block, and of at least this many tokens."""


@dataclass(frozen=True)
class Bucket:
    """Continuations by their share of distinct 4-grams."""

    name: str
    headline: bool = False


LOOPING = Bucket("under 0.3")
MIXED = Bucket("0.3 to 0.6")
VARIED = Bucket("above 0.6", headline=True)
BUCKETS = (LOOPING, MIXED, VARIED)
"""Most repetitive first. Drafters are judged by the last."""


def distinct_share(tokens: Sequence[int]) -> float | None:
    """Distinct 4-grams over all 4-grams; None if the continuation is too short to judge."""
    if len(tokens) < SHORTEST:
        return None
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return len(set(grams)) / len(grams)


def bucket_of(tokens: Sequence[int]) -> Bucket | None:
    """The bucket of a plain continuation; None if it is too short to judge."""
    share = distinct_share(tokens)
    if share is None:
        return None
    return LOOPING if share < 0.3 else MIXED if share <= 0.6 else VARIED


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where the loop begins in which the continuation ends; None if it does not end in a loop."""
    starts = [
        start for period in range(1, len(tokens) // LOOP_ROUNDS + 1) if (start := _tail(tokens, period)) is not None
    ]
    return min(starts, default=None)


def _tail(tokens: Sequence[int], period: int) -> int | None:
    """Where the longest tail that repeats with this period begins, if it is long enough to be a loop."""
    first = len(tokens) - period
    while first > 0 and tokens[first - 1] == tokens[first - 1 + period]:
        first -= 1
    length = len(tokens) - first
    return first if length >= max(LOOP_ROUNDS * period, LOOP_TOKENS) else None
