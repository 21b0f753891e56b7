"""From the times at which clients received tokens to the figures of a load, in process and over HTTP alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Exchange:
    """One request, as its client sees it. Times in seconds, all from one clock."""

    sent: float
    at: Sequence[float]
    """When each event with tokens arrived. Not empty."""
    counts: Sequence[float]
    """Tokens of each event. Over HTTP only their sum is known, so it is divided equally."""


@dataclass(frozen=True)
class Times:
    """Of a window of time. Times in milliseconds; None if nothing fell into the window.

    first: of the requests sent in it. event: between two events of a request, of which the later is in it. token: the
    same per token of the later event, so that events with many tokens count as often.
    """

    tokens_per_s: float
    first_p50: float | None
    first_p99: float | None
    event_p50: float | None
    event_p99: float | None
    token_mean: float | None
    token_p99: float | None

    @classmethod
    def of(cls, exchanges: Iterable[Exchange], begin: float, end: float) -> Times:
        """begin, end: the window, in seconds."""
        first: list[float] = []
        gaps, counts = [np.empty(0)], [np.empty(0)]
        tokens = 0.0
        for exchange in exchanges:
            at, count = np.asarray(exchange.at), np.asarray(exchange.counts, dtype=float)
            inside = (at >= begin) & (at < end)
            tokens += float(count[inside].sum())
            if begin <= exchange.sent < end:
                first.append(float(at[0]) - exchange.sent)
            gaps.append(np.diff(at)[inside[1:]])
            counts.append(count[1:][inside[1:]])
        between, many = np.concatenate(gaps), np.concatenate(counts)
        per_token = between / many
        return cls(
            tokens_per_s=tokens / (end - begin),
            first_p50=_ms(first, 50),
            first_p99=_ms(first, 99),
            event_p50=_ms(between, 50),
            event_p99=_ms(between, 99),
            token_mean=1e3 * float(between.sum() / many.sum()) if len(many) else None,
            token_p99=_weighted_ms(per_token, many, 0.99) if len(many) else None,
        )


def _ms(seconds: Sequence[float] | np.ndarray, percent: float) -> float | None:
    return 1e3 * float(np.percentile(np.asarray(seconds), percent)) if len(seconds) else None


def _weighted_ms(seconds: np.ndarray, weights: np.ndarray, share: float) -> float:
    """The smallest value such that those up to it have at least this share of the weight."""
    order = np.argsort(seconds)
    reached = np.cumsum(weights[order])
    return 1e3 * float(seconds[order][np.searchsorted(reached, share * reached[-1])])
