"""Depth policies that no engine ships: they may change how fast tokens come, but never which."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stridelm.schedule.depth import NOBODY, Configured, Others
from stridelm.schedule.rows import catches_up
from stridelm.types import Request, Span


@dataclass
class RandomDepths(Configured):
    """Any depth that the request can run, often 0."""

    seed: int = 5
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def drafts(self, requests: int) -> bool:
        return self._draw.random() < 0.5

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [self._draw.choice((0, 0, *range(len(request.rows_by_depth)))) for request in requests]


class RandomChoices(RandomDepths):
    """The same for requests whose depths are chosen; others keep their own."""

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        drawn = super().depths(requests, others)
        return [depth if each.adaptive else len(each.rows_by_depth) - 1 for each, depth in zip(requests, drawn)]


class ByLength(Configured):
    """Any depth that the request can run, the same whenever it has emitted as many tokens."""

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [len(each.output_ids) * 7 % 5 % len(each.rows_by_depth) for each in requests]


@dataclass
class AtMost(Configured):
    """As deep as the request asks for, and no deeper than `levels`."""

    levels: int

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [min(self.levels, len(request.rows_by_depth) - 1) for request in requests]


@dataclass
class Contrary(Configured):
    """Knows what requests will emit: drafts all levels where what is looked up will be refused, and nothing where it
    will be accepted."""

    texts: Mapping[tuple[int, ...], Sequence[int]]
    """Prompt -> output."""

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [0 if self._is_guessed(request) else len(request.rows_by_depth) - 1 for request in requests]

    def _is_guessed(self, request: Request) -> bool:
        """Whether the next token is the one that followed the last one's latest earlier place."""
        known, left = request.token_ids, self.texts[tuple(request.prompt_ids)][len(request.output_ids) :]
        places = [place for place in range(len(known) - 1) if known[place] == known[-1]]
        return bool(places) and known[places[-1] + 1 :][:1] == list(left[:1])


@dataclass
class Spiteful(Configured):
    """Remembers what became of drafts: drafts all levels where the last one under this seed was refused, and nothing
    where it was accepted."""

    accepted: dict[tuple[int, int], bool] = field(default_factory=dict)
    """(seed, known tokens) -> whether any level was accepted."""

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        known = [self.accepted.get((request.seed, request.known), False) for request in requests]
        return [0 if right else len(request.rows_by_depth) - 1 for request, right in zip(requests, known)]

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
        for span, levels in zip(spans, accepted):
            if span.depth:
                self.accepted[span.request.seed, span.start + span.real] = levels > 0


@dataclass
class Swinging(Configured):
    """Nothing for a few steps, then all levels for as many, and so on: whatever follows the target is always behind."""

    steps: int = 3
    landings: int = 0
    caught_up: int = 0
    """Steps in which drafters did."""

    def drafts(self, requests: int) -> bool:
        return bool(self.landings // self.steps % 2)

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [len(request.rows_by_depth) - 1 if self.drafts(1) else 0 for request in requests]

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
        self.landings += 1
        self.caught_up += any(map(catches_up, spans))
