"""How many drafted tokens a step accepts if acceptance is simulated (verify/synthetic.py): the distribution.

A draft of depth D is accepted up to 0 to D levels: each further token with the same probability p, and the first
rejected one ends the step. That is a geometric distribution truncated at D, and p is chosen to give it the requested
mean.
"""

from __future__ import annotations

import math
from functools import lru_cache

from stridelm.types import MAX_DRAFT_ROWS

NUMBERS = MAX_DRAFT_ROWS + 1


@lru_cache(maxsize=64)
def log_odds(mean: float, depth: int) -> list[float]:
    """Log-probabilities of 0, 1, .. NUMBERS - 1 accepted tokens, where 1 + accepted has this mean."""
    p = chance_of_another(mean, depth)
    odds = [p**n * (1 - p) for n in range(depth)] + [p**depth]
    return [math.log(chance) if chance else -math.inf for chance in odds] + [-math.inf] * (NUMBERS - len(odds))


def chance_of_another(mean: float, depth: int) -> float:
    """The p with 1 + p + ... + p**depth = mean, by bisection: P(more than n tokens) is p**n for n up to `depth`."""
    low, high = 0.0, 1.0
    for _ in range(64):
        middle = (low + high) / 2
        if sum(middle**n for n in range(depth + 1)) < mean:
            low = middle
        else:
            high = middle
    return high
