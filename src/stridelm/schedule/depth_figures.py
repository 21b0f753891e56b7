"""What came of choosing depths: counted for metrics, and told of one step to whoever asks why it is as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stridelm.schedule.rows import catches_up, is_unseen, useful_depth
from stridelm.types import Cause, Reason, Span


@dataclass(slots=True)
class DepthFigures:
    """Counted since the engine started."""

    depths: dict[str, int] = field(default_factory=dict)
    """Levels drafted in a step for a request whose depth is chosen -> how often."""
    drafted: int = 0
    """Draft rows that ran."""
    spared: int = 0
    """Draft rows that fixed depths would have run besides."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("predicted", "measured"), 0.0))
    """Of those steps whose time was predicted, to compare."""
    tokens: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("predicted", "measured"), 0.0))
    """The same for what they emitted."""
    gain: float | None = None
    """Tokens per second over those of plain decoding, as estimated when a depth was last chosen; None before."""

    def count(self, often: Sequence[int], drafted: int, most: int) -> None:
        """A step: requests whose depths are chosen for which 0, 1, .. levels were drafted, its draft rows, and those
        of the full drafts."""
        for depth, requests in enumerate(often):
            if requests:
                self.depths[str(depth)] = self.depths.get(str(depth), 0) + requests
        self.drafted += drafted
        self.spared += most - drafted

    def compare(self, seconds: tuple[float, float], tokens: tuple[float, float]) -> None:
        """A step's (predicted, measured) time, and tokens."""
        for figures, pair in ((self.seconds, seconds), (self.tokens, tokens)):
            for name, value in zip(("predicted", "measured"), pair, strict=True):
                figures[name] += value


@dataclass(frozen=True, slots=True)
class Pick:
    """What a policy chose for one request of a step, and by what."""

    depth: int
    """Levels that it was to draft."""
    probes: bool
    """The depth was tried only to learn about it."""
    most: int | None
    """Levels that no request was to exceed; None if there was no such depth."""
    least: float
    """Chance under which a level is not worth its row to this request, whose tokens may count for more than others'."""
    chances: Sequence[float]
    """Of each level to be reached and accepted, as they were known when the depth was chosen."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy chose for the requests of one step, and what it expected of it."""

    picks: Sequence[Pick]
    seconds: float | None
    """Expected time of the step; None before any was measured."""


def reasons(spans: Sequence[Span], choice: Choice | None) -> tuple[Reason, ...]:
    """A step's, in the order of its spans. choice: of the policy for those spans that decide and that are not
    `all_or_nothing`, in order; None if depths are not chosen."""
    places = {id(span): place for place, span in enumerate(filter(is_free, spans))}
    behind = any(map(catches_up, spans))
    return tuple(_reason(span, choice, places.get(id(span)), behind) for span in spans)


def is_free(span: Span) -> bool:
    """Whether the policy had a say in its depth."""
    return span.decides and not span.request.all_or_nothing and not is_unseen(span.request, span.real)


def _reason(span: Span, choice: Choice | None, place: int | None, behind: bool) -> Reason:
    request, levels = span.request, len(span.request.rows_by_depth) - 1
    if not levels and span.decides:
        return Reason("plain", levels)
    if not span.decides or is_unseen(request, span.real):
        return Reason("prompt", levels)
    if place is None:
        return Reason("window", levels)
    pick = None if choice is None else choice.picks[place]
    allowed = levels if pick is None else pick.depth
    useful = useful_depth(request)
    held = span.depth < min(allowed, useful)
    if held and not behind:
        return Reason("room", levels)
    if request.found is not None and span.depth == request.found.levels < levels:
        less: Cause | None = "found"
    else:
        less = "ending" if useful < allowed else None
    if choice is None or pick is None or not request.adaptive:
        return Reason("behind" if held else less or "asked", levels)
    cause: Cause = "behind" if held else less or ("probe" if pick.probes else "chosen")
    most = None if pick.probes else pick.most
    least = None if pick.probes or most == 0 else pick.least
    return Reason(cause, levels, most, least, pick.chances[:levels], choice.seconds)
