"""What became of the drafts of one request, under vLLM's names (`--per-request-spec-decode-metrics`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

from stridelm.stats import VerifiedDrafts
from stridelm.types import Request


@dataclass(frozen=True, slots=True)
class SpecDecodeMetrics:
    """Counts over the verify steps of one sample: those with a draft. What a step accepted beyond the end of the output
    counts, and the token that a step emits in any case (the bonus token) does not.

    mean_acceptance_length: tokens per verify step, the bonus token included; 1 if there was no such step.
    draft_acceptance_rate: share of the drafted tokens that were accepted; 0 if there were none.
    acceptance_histogram: entry j is the number of verify steps that accepted exactly j tokens, for j up to
        num_spec_tokens.
    acceptance_histogram_by_draft_length: number of drafted tokens -> the same for the steps that drafted so many.
    num_spec_tokens: the request's depth. A tree may draft more tokens than that, on several branches, but accepts no
        more.
    per_step_accepted, per_step_drafted: of each verify step, in order; None unless asked for (`detailed`).
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    acceptance_histogram_by_draft_length: dict[int, tuple[int, ...]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: tuple[int, ...] | None = None
    per_step_drafted: tuple[int, ...] | None = None

    @classmethod
    def of(cls, request: Request) -> SpecDecodeMetrics | None:
        """As of now. None if the engine was not asked to count, or if the request does not draft."""
        verified, depth = request.stats.verified, request.speculation.depth or 0
        return None if verified is None else _metrics(verified, depth)

    def as_json(self) -> dict[str, Any]:
        """The fields that are set, as vLLM returns them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def _metrics(verified: VerifiedDrafts, depth: int) -> SpecDecodeMetrics:
    histogram = _dense(map(sum, zip_longest(*verified.counts.values(), fillvalue=0)), depth)
    steps = sum(histogram)
    accepted = sum(tokens * count for tokens, count in enumerate(histogram))
    drafted = sum(tokens * sum(counts) for tokens, counts in verified.counts.items())
    return SpecDecodeMetrics(
        mean_acceptance_length=1 + accepted / steps if steps else 1.0,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        acceptance_histogram=histogram,
        acceptance_histogram_by_draft_length={
            tokens: _dense(verified.counts[tokens], min(tokens, depth)) for tokens in sorted(verified.counts)
        },
        num_spec_steps=steps,
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=depth,
        per_step_accepted=None if verified.accepted is None else tuple(verified.accepted),
        per_step_drafted=None if verified.drafted is None else tuple(verified.drafted),
    )


def _dense(counts: Iterable[int], most: int) -> tuple[int, ...]:
    """Padded with zeros to the entries 0 to `most`."""
    known = tuple(counts)
    return known + (0,) * (most + 1 - len(known))
