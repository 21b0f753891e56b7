"""Cost tables: how long the steps of one engine on one machine take, and what its requests were like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stridelm.schedule.rows import catches_up, has_prompt
from stridelm.simulate.curve import DecodeCurve, DecodePoint, PromptCurve, PromptPoint
from stridelm.types import Follow, Span

PLAIN = "none"
"""The drafter of plain decoding."""


@dataclass(frozen=True)
class EngineLimits:
    """Of the engine that was measured; names as in EngineConfig."""

    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    max_model_len: int
    itl_target_ms: float = 40.0
    lag: int = 0
    """Steps that are launched before the verdict of the one before is read: 0 on a CPU, 1 on a GPU."""
    patience: int = 0
    apart: bool = False
    """Both as of schedule/waits.py, if depths are chosen; 0 and False in tables that do not say it."""


@dataclass(frozen=True)
class DrafterCosts:
    """What steps take whose requests all have this drafter."""

    rows_by_depth: tuple[int, ...]
    """Draft rows of a request at depth 0, 1, .. up to the deepest that was measured."""
    decode: tuple[DecodePoint, ...]
    prompts: tuple[PromptPoint, ...]
    usual_depth: int
    """What the drafter drafts to by default, and `auto` at most."""
    host_bound: bool = False
    """The host must see a request's tokens before it can draft again."""
    stairs: tuple[int, ...] = ()
    may_wait: bool = False
    """It keeps KV of its own, which may be computed some steps later. In the steps of the points it was not."""
    decoding: DecodeCurve = field(init=False, compare=False)
    reading: PromptCurve = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError if the points do not make curves."""
        object.__setattr__(self, "decoding", DecodeCurve(self.decode, self.rows_by_depth, self.stairs))
        object.__setattr__(self, "reading", PromptCurve(self.prompts))

    def seconds(self, spans: Sequence[Span]) -> float:
        """Of a step in which no drafter waits or catches up. If it has prompt rows: what a step of prompts with as many
        known tokens takes, and what drafts add to a step of as many requests that decode."""
        real = sum(span.real for span in spans)
        deciding = [span for span in spans if span.decides]
        count, drafted = len(deciding), sum(span.draft for span in deciding)
        depth = max((span.depth for span in deciding), default=0)
        context = sum(span.start + span.real - 1 for span in deciding) / max(1, count)
        if not any(map(has_prompt, spans)):
            return self.decoding.seconds(count, count + drafted, depth, context)
        seen = sum(span.real * (span.start + (span.real - 1) / 2) for span in spans) / real
        seconds = self.reading.seconds(real, seen)
        if depth:
            drafting = self.decoding.seconds(count, count + drafted, depth, context)
            seconds += max(0.0, drafting - self.decoding.seconds(count, count, 0, context))
        return seconds


@dataclass(frozen=True)
class RecordedRequest:
    """A request that was measured."""

    prompt_tokens: int
    max_tokens: int
    chances: Mapping[str, tuple[float, ...]]
    """Drafter -> the chance that each level of its drafts is accepted, given that the levels before it were."""


@dataclass(frozen=True)
class CostTable:
    hardware: str
    model: str
    engine: EngineLimits
    drafters: Mapping[str, DrafterCosts]
    stairs: tuple[int, ...] = ()
    """Numbers of requests that steps are padded to, as captured steps are."""
    scenario: str = ""
    """Name of what the requests ask."""
    requests: tuple[RecordedRequest, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    """The environment in which it was recorded."""

    def seconds(self, drafter: str, spans: Sequence[Span]) -> float:
        """Of a step whose requests all have this drafter. What its own KV takes is what its steps without drafts take
        longer than plain ones. A span that waits is spared its share of that, by real rows; catching up takes as much
        longer as it takes to read a prompt of so many rows."""
        own, plain = self.drafters[drafter], self.drafters[PLAIN]
        seconds = own.seconds(spans)
        waiting = sum(span.real for span in spans if span.follow is Follow.LATER)
        if waiting:
            bare = [replace(span, depth=0, draft=0) for span in spans]
            share = waiting / sum(span.real for span in spans)
            seconds -= share * max(0.0, own.seconds(bare) - plain.seconds(bare))
        behind = sum(span.behind for span in spans if catches_up(span))
        if behind:
            seconds += max(0.0, own.reading.seconds(behind, 0) - plain.reading.seconds(behind, 0))
        return seconds

    @property
    def most_requests(self) -> int:
        """Of a step, as far as every drafter was measured."""
        return min(costs.decoding.requests[-1] for costs in self.drafters.values())
