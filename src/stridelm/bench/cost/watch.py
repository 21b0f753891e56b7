"""A depth policy that drafts as it is told, and notes how long each step took.

The planner asks it for depths and tells it when a step has landed, so it sees every step of an engine as a policy does.
A step's time is that from the landing before it to its own: with it goes what the host does between two steps, which a
stream of steps pays too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from stridelm.schedule import Configured
from stridelm.schedule.depth import NOBODY, Others
from stridelm.schedule.rows import has_prompt
from stridelm.types import Request, Span


@dataclass(frozen=True, slots=True)
class Note:
    """A step that landed."""

    requests: int
    rows: int
    depth: int
    context: float
    """Tokens that a request had before it, on average."""
    prompts: bool
    seconds: float

    @property
    def kind(self) -> tuple[int, int, int, bool]:
        return self.requests, self.rows, self.depth, self.prompts


class Watch(Configured):
    """depth: of the first `drafting` requests; the others do not draft. Nobody looks for drafts beforehand, so that
    rows are those that were told."""

    rests = True

    def __init__(self) -> None:
        super().__init__()
        self.depth = self.drafting = 0
        self.notes: list[Note] = []
        self._last = 0.0

    def begin(self) -> None:
        """Forget the notes; a step begins now."""
        self.notes.clear()
        self._last = time.perf_counter()

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [
            min(self.depth, len(request.rows_by_depth) - 1) if place < self.drafting else 0
            for place, request in enumerate(requests, start=others.asked)
        ]

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
        before, self._last = self._last, time.perf_counter()
        rows, depth = sum(span.rows for span in spans), max(span.depth for span in spans)
        context = sum(span.start for span in spans) / len(spans)
        prompts = any(map(has_prompt, spans))
        self.notes.append(Note(len(spans), rows, depth, context, prompts, self._last - before))

    def clear(self) -> None:
        self.notes.clear()
