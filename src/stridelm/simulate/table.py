"""Cost tables: how long the steps of one engine on one machine take, and what its requests were like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stridelm.schedule.rows import has_prompt
from stridelm.simulate.curve import DecodeCurve, DecodePoint, PromptCurve, PromptPoint
from stridelm.types import Span

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
    decoding: DecodeCurve = field(init=False, compare=False)
    reading: PromptCurve = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError if the points do not make curves."""
        object.__setattr__(self, "decoding", DecodeCurve(self.decode, self.rows_by_depth, self.stairs))
        object.__setattr__(self, "reading", PromptCurve(self.prompts))

    def seconds(self, spans: Sequence[Span]) -> float:
        """Of a step. Prompt rows add to a decode step what they add to a step of prompts with as many rows as it has,
        and drafts that nobody makes yet, since their requests still read their prompts, are rows like theirs."""
        decoding = [span for span in spans if not has_prompt(span)]
        reading = [span for span in spans if has_prompt(span)]
        rows = sum(span.rows for span in decoding)
        seconds = 0.0
        if decoding:
            context = sum(span.start for span in decoding) / len(decoding)
            seconds = self.decoding.seconds(len(decoding), rows, max(span.depth for span in decoding), context)
        if reading:
            more = sum(span.rows for span in reading)
            seen = sum(span.rows * (span.start + (span.rows - 1) / 2) for span in reading) / more
            seconds += self.reading.seconds(rows + more, seen)
            if decoding:
                seconds -= min(seconds, self.reading.seconds(rows, seen))
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

    @property
    def most_requests(self) -> int:
        """Of a step, as far as every drafter was measured."""
        return min(costs.decoding.requests[-1] for costs in self.drafters.values())
