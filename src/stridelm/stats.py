"""What a request has cost and gained so far."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class VerifiedDrafts:
    """The steps that verified a draft of one request. A step that drafted nothing is not among them."""

    drafted: list[int] | None = None
    """Tokens drafted in each of these steps, in order; None unless asked for."""
    accepted: list[int] | None = None
    """Of these, how many were accepted; None unless asked for."""
    counts: dict[int, list[int]] = field(default_factory=dict)
    """counts[k][j]: steps that drafted k tokens and accepted j of them; a list is as long as was needed."""


@dataclass(slots=True)
class DraftCounts:
    """What became of drafts that were verified."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    """Drafts of which at least the first token was accepted."""


@dataclass(slots=True)
class RequestStats:
    """What a request has cost and gained so far. Times are seconds on `time.perf_counter`'s clock."""

    arrived_s: float = 0.0
    admitted_s: float | None = None
    """When it first left the queue."""
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    steps: int = 0
    """Steps that emitted at least one token for this request."""
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """accepted_at[d]: steps in which the draft's position d was accepted."""
    reached_at: list[int] = field(default_factory=list)
    """reached_at[d]: steps in which position d was drafted and all positions before it were accepted."""
    by_source: dict[str, DraftCounts] = field(default_factory=dict)
    """Of drafts from each source."""
    preemptions: int = 0
    pace: float | None = None
    """Tokens per second of late, if it has a target."""
    verified: VerifiedDrafts | None = None
    """None unless the engine was asked for it (EngineConfig.per_request_spec_decode_metrics)."""
