"""What a request's tokens count for, against those of the others in a step, when depths are chosen.

All count alike, unless a request has another priority, or is behind its target (`SamplingParams.target_tps`).
"""

from __future__ import annotations

from stridelm.types import Request

MOST = 8.0
"""By how much a priority, or a missed target, can make tokens count for more. (A priority can also make them count for
that much less.)"""
PACE = 0.1
"""Weight of the latest step in a request's pace."""


def keep_pace(request: Request, emitted: int, seconds: float) -> None:
    """Note how fast a request that has a target goes. emitted: its tokens in a step that took this long; if that is no
    time, by a clock with long ticks, nothing is noted."""
    if seconds <= 0.0:
        return
    stats, rate = request.stats, emitted / seconds
    stats.pace = rate if stats.pace is None else stats.pace + PACE * (rate - stats.pace)


def weight(request: Request) -> float:
    """1 for one like any other."""
    found = min(MOST, max(1 / MOST, 2.0 ** min(60, -request.priority)))
    target, pace = request.params.target_tps, request.stats.pace
    if target is not None and pace is not None:
        found *= min(MOST, max(1.0, target / max(pace, 1e-9)))
    return found
