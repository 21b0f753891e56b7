"""From timelines to the figures of a row: percentiles of times, tokens per step, acceptance by position."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stridelm.bench.drive import Timeline
from stridelm.stats import RequestStats

QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of times, in seconds. None if there was nothing to measure."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        if not values:
            return cls(None, None, None)
        return cls(*(float(x) for x in np.percentile(np.asarray(values), QUANTILES)))


@dataclass(frozen=True)
class Times:
    """ttft: from being added to the first token. tpot: each request's mean time per token after its first emission.
    itl: gaps between a request's successive emissions, which have one token each in plain decoding and several if a
    draft was accepted."""

    ttft_s: Percentiles
    tpot_s: Percentiles
    itl_s: Percentiles

    @classmethod
    def of(cls, timelines: Iterable[Timeline]) -> Times:
        ttft: list[float] = []
        tpot: list[float] = []
        itl: list[float] = []
        for timeline in timelines:
            at = [when for when, _ in timeline.emissions]
            later = sum(count for _, count in timeline.emissions) - timeline.emissions[0][1]
            ttft.append(at[0])
            itl += [after - before for before, after in itertools.pairwise(at)]
            if later:
                tpot.append((at[-1] - at[0]) / later)
        return cls(Percentiles.of(ttft), Percentiles.of(tpot), Percentiles.of(itl))


@dataclass(frozen=True)
class Acceptance:
    """Position d counts from the first drafted token.

    conditional[d]: share accepted of the steps that tested position d. marginal[d]: share accepted of the steps that
    drafted anything for the request. coverage: share of a request's emitting steps that drafted. tokens_per_step:
    output tokens over the steps that emitted any, each request counted separately.
    """

    tokens_per_step: float
    coverage: float
    conditional: tuple[float, ...]
    marginal: tuple[float, ...]
    drafted: int
    accepted: int

    @classmethod
    def of(cls, tokens: int, stats: Sequence[RequestStats]) -> Acceptance:
        """tokens: how many tokens the requests with these stats emitted."""
        accepted, reached = _totals(s.accepted_at for s in stats), _totals(s.reached_at for s in stats)
        steps = sum(s.steps for s in stats)
        accepted += [0] * (len(reached) - len(accepted))
        drafting = reached[0] if reached else 0
        return cls(
            tokens_per_step=tokens / steps if steps else 0.0,
            coverage=drafting / steps if steps else 0.0,
            conditional=tuple(a / r if r else 0.0 for a, r in zip(accepted, reached)),
            marginal=tuple(a / drafting for a in accepted),
            drafted=sum(s.drafted for s in stats),
            accepted=sum(s.accepted for s in stats),
        )


def acceptance_of(timelines: Sequence[Timeline]) -> Acceptance:
    tokens = sum(len(timeline.token_ids) for timeline in timelines)
    return Acceptance.of(tokens, [timeline.request.stats for timeline in timelines])


def _totals(counts: Iterable[Sequence[int]]) -> list[int]:
    """Sums by position over lists of different length."""
    totals: list[int] = []
    for row in counts:
        totals += [0] * (len(row) - len(totals))
        for i, count in enumerate(row):
            totals[i] += count
    return totals
