"""Counters of the engine, for metrics, benchmarks and the summary line of `stride generate`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields

from stridelm.schedule.depth_figures import DepthFigures
from stridelm.stats import DraftCounts, VerifiedDrafts
from stridelm.types import Request


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started."""

    steps: int = 0
    rows: int = 0
    emitted: int = 0
    prompt: int = 0
    cached_prompt: int = 0
    """Of the prompt tokens of admitted requests, those that were found in the prefix cache."""
    drafted: int = 0
    accepted: int = 0
    finished: int = 0
    preemptions: int = 0
    aborted: int = 0
    failed: int = 0
    """Requests that ended because of an error of their own."""
    failed_steps: int = 0
    """Steps that failed and were retried because no request could be blamed yet."""
    memory_shortages: int = 0
    """Steps that ran out of memory and were retried with fewer rows."""
    resplits: int = 0
    """Times that memory was moved from one page group to another."""
    captures: int = 0
    """Graphs captured, those at the start included."""
    missing_graphs: int = 0
    """Graphs that there was no memory for, now: the steps that need one run part by part."""
    compilations: int = 0
    """Kernels compiled, those at the start included."""
    uncaptured: dict[str, int] = field(default_factory=dict)
    """Steps that ran part by part on a GPU that captures steps, by reason."""
    depths: DepthFigures | None = None
    """What came of choosing depths, if they are chosen."""
    part_ms: dict[str, float] = field(default_factory=dict)
    """Device milliseconds by part of a step (engine/step_timer.py), while `Engine.time_steps` is on."""

    def reset(self) -> None:
        """Count from 0 again, in place."""
        for own in fields(self):
            setattr(self, own.name, own.default if own.default_factory is MISSING else own.default_factory())


def count_acceptance(request: Request, accepted: int, reached: int, drafted: int, source: int = 0) -> None:
    """Add what became of one step's draft to the request's stats. source: the number of where it came from."""
    stats = request.stats
    stats.drafted += drafted
    stats.accepted += accepted
    for at, upto in ((stats.accepted_at, accepted), (stats.reached_at, reached)):
        if upto > len(at):
            at.extend([0] * (upto - len(at)))
        for position in range(upto):
            at[position] += 1
    if not drafted:
        return
    if source < len(request.sources):
        name = request.sources[source]
        counts = stats.by_source.get(name)
        if counts is None:
            counts = stats.by_source[name] = DraftCounts()
        counts.drafts += 1
        counts.drafted += drafted
        counts.accepted += accepted
        counts.hits += accepted > 0
    if stats.verified is not None:
        _count_draft(stats.verified, drafted, accepted)


def _count_draft(verified: VerifiedDrafts, drafted: int, accepted: int) -> None:
    counts = verified.counts.setdefault(drafted, [])
    counts.extend([0] * (accepted + 1 - len(counts)))
    counts[accepted] += 1
    if verified.drafted is not None and verified.accepted is not None:
        verified.drafted.append(drafted)
        verified.accepted.append(accepted)
