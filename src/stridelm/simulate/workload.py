"""What requests ask, and which of their drafts are accepted.

Whether the token at a position of a request's output would be guessed by a draft is drawn once, from the seed, the
request and the position. So a request has the same fate under every policy, and two policies are compared on the same
luck.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stridelm.sample.length import chance_of_another
from stridelm.types import OVERRUN
from stridelm.values import number

FORM = (
    "each kind of request is the mean tokens per step at the deepest draft (1.2), a chance below 1 for every level "
    "(0.8), or a chance for each level (0.8/0.7/0.5)"
)


@dataclass(frozen=True)
class Job:
    """A request before it is sent."""

    prompt_tokens: int
    max_tokens: int
    chances: tuple[float, ...]
    """The chance that each level of its drafts is accepted, given that the levels before it were."""
    luck: tuple[float, ...]
    """Uniform in [0, 1), one for each position of its output, and for those that steps in flight overrun."""

    @classmethod
    def drawn(cls, prompt_tokens: int, max_tokens: int, chances: Sequence[float], seed: int, number: int) -> Job:
        """number: of the request within its run."""
        draw = random.Random(f"{seed} {number}")
        return cls(prompt_tokens, max_tokens, tuple(chances), tuple(draw.random() for _ in range(max_tokens + OVERRUN)))

    def accepted(self, position: int, depth: int) -> int:
        """Levels that are accepted of a draft of this depth, whose first level guesses the output's token at
        `position`."""
        luck = self.luck[position : position + depth]
        return next((level for level, u in enumerate(luck) if u >= self.chances[level]), len(luck))


def read_acceptance(entries: Sequence[str], depth: int) -> list[tuple[float, ...]]:
    """The chances of each kind of request, for drafts of up to `depth` levels. Raises ValueError for an entry that
    cannot be read, or that drafts of this depth cannot reach."""
    return [_chances(entry, depth) for entry in entries]


def _chances(entry: str, depth: int) -> tuple[float, ...]:
    try:
        values = [number("a chance", float(word), 0, 1) for word in entry.split("/")] if "/" in entry else []
        value = float(entry) if not values else 0.0
    except ValueError as error:
        raise ValueError(f"acceptance {entry!r} cannot be read; {FORM}") from error
    if values:
        if len(values) < depth:
            raise ValueError(
                f"acceptance {entry!r} has {len(values)} levels and drafts have up to {depth}; give as many"
            )
        return tuple(values[:depth])
    if 0 <= value < 1:
        return (value,) * depth
    if not 1 <= value <= depth + 1:
        raise ValueError(f"acceptance {entry!r}: drafts of depth {depth} give 1 to {depth + 1} tokens per step; {FORM}")
    return (chance_of_another(value, depth),) * depth
