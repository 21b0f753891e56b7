"""What a step's time depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stridelm.schedule.rows import catches_up, has_prompt
from stridelm.types import Span


@dataclass(frozen=True, slots=True)
class StepShape:
    requests: int
    """That decode: all that decide, but for those at the end of their prompt."""
    rows: int
    """Of these requests: known tokens, drafts, and those that steps are padded with."""
    depth: int
    """Levels of the deepest draft."""
    context: int
    """Tokens before all rows, of all requests of the step together: attention reads them."""
    prompt: int = 0
    """Rows of prompts, with the drafts that grow from their ends."""
    behind: int = 0
    """Rows of earlier steps that drafters catch up with."""

    def with_prompt(self, rows: int) -> StepShape:
        return StepShape(self.requests, self.rows, self.depth, self.context, rows)


def shape_of(spans: Sequence[Span]) -> StepShape:
    """Of a step that is not padded."""
    reading = [span for span in spans if has_prompt(span)]
    prompt = sum([span.rows for span in reading])
    return StepShape(
        len(spans) - len(reading),
        sum([span.rows for span in spans]) - prompt,
        max([span.depth for span in spans], default=0),
        sum([span.start for span in spans]),
        prompt,
        sum([span.behind for span in spans if catches_up(span)]),
    )
