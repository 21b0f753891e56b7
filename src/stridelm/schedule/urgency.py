"""What a request's tokens count for, against those of the others in a step, when depths are chosen.

All count alike, unless a request has another priority, or is behind its target (`SamplingParams.target_tps`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stridelm.types import Request

MOST = 8.0
"""By how much a priority, or a missed target, can make tokens count for more. (A priority can also make them count for
that much less.)"""
PACE = 0.1
"""Weight of the latest step in a request's pace."""


def keep_pace(requests: Sequence[Request], emitted: Sequence[int], seconds: float) -> None:
    """Note how fast requests that have a target go. emitted: their tokens in a step that took this long."""
    for request, tokens in zip(requests, emitted, strict=True):
        if request.params.target_tps is not None:
            stats, rate = request.stats, tokens / seconds
            stats.pace = rate if stats.pace is None else stats.pace + PACE * (rate - stats.pace)


def weights(requests: Sequence[Request]) -> np.ndarray:
    """[R] float64: 1 for those that count most."""
    if not any(request.priority or request.params.target_tps for request in requests):
        return np.ones(len(requests))
    found = np.array([_weight(request) for request in requests])
    heaviest: np.ndarray = found / found.max()
    return heaviest


def _weight(request: Request) -> float:
    weight = min(MOST, max(1 / MOST, 2.0 ** min(60, -request.priority)))
    target, pace = request.params.target_tps, request.stats.pace
    if target is not None and pace is not None:
        weight *= min(MOST, max(1.0, target / max(pace, 1e-9)))
    return weight
