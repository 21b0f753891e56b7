"""Metrics of a finished or running request, as reported to callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stridelm.engine.spec_decode_metrics import SpecDecodeMetrics
from stridelm.stats import DraftCounts
from stridelm.types import Request
from stridelm.verify import RULES


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Metrics of one sample. steps counts the steps that emitted for it; times are in seconds.

    lossless: the acceptance rule promises the distribution of plain decoding.
    simulated: acceptance was drawn at random, with a mean of acceptance_length tokens per step, and the tokens are not
        the model's.
    by_source: what became of drafts from each of the drafter's sources: one, unless it chooses between several.
    queued_s: until it was first admitted; None if it never was.
    speculative_decoding: None unless `per_request_spec_decode_metrics` is summary or detailed and the request drafts.
    """

    steps: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]
    reached_at: tuple[int, ...]
    ttft_s: float | None
    latency_s: float | None
    cached_tokens: int
    preemptions: int
    seed: int
    drafter: str
    acceptance: str
    acceptance_length: float | None
    lossless: bool
    simulated: bool
    depth: int
    speculative_decoding: SpecDecodeMetrics | None = None
    queued_s: float | None = field(default=None, compare=False)
    by_source: Mapping[str, DraftCounts] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        stats = request.stats
        spec = request.speculation
        assert spec.drafter is not None and spec.acceptance is not None, "a request's speculation is settled"
        rule = RULES.get(spec.acceptance)
        return cls(
            steps=stats.steps,
            drafted=stats.drafted,
            accepted=stats.accepted,
            accepted_at=tuple(stats.accepted_at),
            reached_at=tuple(stats.reached_at),
            ttft_s=None if stats.first_token_s is None else stats.first_token_s - stats.arrived_s,
            latency_s=None if stats.finished_s is None else stats.finished_s - stats.arrived_s,
            cached_tokens=stats.cached_tokens,
            preemptions=stats.preemptions,
            seed=request.seed,
            drafter=spec.drafter,
            acceptance=rule.name,
            acceptance_length=spec.acceptance_length,
            lossless=rule.lossless,
            simulated=rule.simulated,
            depth=spec.depth or 0,
            speculative_decoding=SpecDecodeMetrics.of(request),
            queued_s=None if stats.admitted_s is None else stats.admitted_s - stats.arrived_s,
            by_source={source: replace(counts) for source, counts in stats.by_source.items()},
        )
