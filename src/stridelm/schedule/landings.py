"""Steps that have landed and that the policy that chooses depths has not looked at yet (adaptive.py).

Steps of the same requests are looked at as one, so they are kept together, as long as they only decode.

Legend: S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stridelm.schedule.rows import catches_up
from stridelm.types import Request, Span


@dataclass(frozen=True)
class Landed:
    """Steps of the same requests that have landed one after another. A step that does not only decode is alone."""

    spans: Sequence[Span]
    """Of the first step."""
    requests: list[Request]
    decodes: bool
    """Whether each span has one row but for its draft, of which the policy has a say, and catches up with nothing."""
    depths_S: list[Sequence[int]] = field(default_factory=list)
    """Levels of each span's draft."""
    accepted_S: list[Sequence[int]] = field(default_factory=list)
    """Those that were."""
    contexts_S: list[int] = field(default_factory=list)
    """Tokens before all rows."""
    seconds_S: list[float] = field(default_factory=list)


class Landings:
    def __init__(self) -> None:
        self._landed: list[Landed] = []
        self.count = 0
        """Steps."""

    def add(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> Landed:
        """A step has landed. Returns it, with those that it goes on."""
        requests = [span.request for span in spans]
        decodes = all(span.decides and span.real == 1 and not catches_up(span) for span in spans)
        decodes = decodes and not any(request.all_or_nothing for request in requests)
        latest = self._landed[-1] if self._landed else None
        if latest is None or not (decodes and latest.decodes and latest.requests == requests):
            latest = Landed(spans, requests, decodes)
            self._landed.append(latest)
        latest.depths_S.append([span.depth for span in spans])
        latest.accepted_S.append(accepted)
        latest.contexts_S.append(sum([span.start for span in spans]))
        latest.seconds_S.append(seconds)
        self.count += 1
        return latest

    def take(self) -> list[Landed]:
        """All of them, which are no longer kept."""
        taken, self._landed, self.count = self._landed, [], 0
        return taken
