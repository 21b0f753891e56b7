"""From runs to the figures of a cell, by the definitions of `vllm bench serve`.

ttft: from sending to the first event with tokens. itl: gaps between a request's events. tpot: the time from a request's
first event to its last, over its output tokens but one. e2el: from sending to the last event. Times are in
milliseconds, rates per second, over all requests of all runs.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stridelm.bench.serving.objective import Objective
from stridelm.bench.serving.record import Run

PERCENTS = (50, 95, 99)


@dataclass(frozen=True)
class Percentiles:
    """None if there was nothing to measure."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """In milliseconds."""
        if not seconds:
            return cls(None, None, None)
        return cls(*(float(value) for value in 1e3 * np.percentile(np.asarray(seconds), PERCENTS)))


@dataclass(frozen=True)
class Figures:
    requests: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    """Of one run; the median. So are the rates."""
    requests_per_s: float
    tokens_per_s: float
    goodput: float | None
    """Requests per second that met the objective; None without one."""
    met_share: float | None
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2el_ms: Percentiles
    tokens_per_step: float | None
    """Output tokens over the steps that emitted them; None if the server does not report steps."""
    accepted_share: float | None
    """Of the drafted tokens; None if none were drafted or the server does not report it."""
    client_busy: float | None

    @classmethod
    def of(cls, runs: Sequence[Run], objective: Objective | None = None) -> Figures:
        done = [completion for run in runs for completion in run.answered]
        gaps = [after - before for each in done for before, after in itertools.pairwise(each.at)]
        met = None if objective is None else [sum(map(objective.met, run.answered)) for run in runs]
        steps = [each.steps for each in done if each.steps is not None]
        drafted = sum(each.drafted or 0 for each in done)
        busy = [run.client_busy for run in runs if run.client_busy is not None]
        return cls(
            requests=len(done),
            errors=sum(len(run.errors) for run in runs),
            prompt_tokens=sum(each.prompt_tokens for each in done),
            completion_tokens=sum(each.tokens for each in done),
            seconds=statistics.median(run.seconds for run in runs),
            requests_per_s=statistics.median(len(run.answered) / run.seconds for run in runs),
            tokens_per_s=statistics.median(run.tokens_per_s for run in runs),
            goodput=None if met is None else statistics.median(n / run.seconds for n, run in zip(met, runs)),
            met_share=None if met is None or not done else sum(met) / len(done),
            ttft_ms=Percentiles.of([each.ttft for each in done]),
            tpot_ms=Percentiles.of([each.tpot for each in done if each.tpot is not None]),
            itl_ms=Percentiles.of(gaps),
            e2el_ms=Percentiles.of([each.latency for each in done]),
            tokens_per_step=sum(each.tokens for each in done) / sum(steps) if len(steps) == len(done) != 0 else None,
            accepted_share=sum(each.accepted or 0 for each in done) / drafted if drafted else None,
            client_busy=max(busy) if busy else None,
        )


@dataclass(frozen=True)
class Ratio:
    """Of paired runs: each run's figure over that of the run beside it."""

    median: float
    low: float
    high: float
    runs: tuple[float, ...]

    @classmethod
    def of(cls, pairs: Sequence[tuple[float | None, float | None]]) -> Ratio | None:
        """pairs: (figure, figure of the base). None unless all pairs have both."""
        ratios = [figure / base for figure, base in pairs if figure and base]
        if not ratios or len(ratios) < len(pairs):
            return None
        return cls(statistics.median(ratios), min(ratios), max(ratios), tuple(ratios))


def speed_ratio(runs: Sequence[Run], bases: Sequence[Run]) -> Ratio | None:
    """Of tokens per second."""
    return Ratio.of([(run.tokens_per_s, base.tokens_per_s) for run, base in zip(runs, bases, strict=True)])


def over_best(runs: Sequence[Run], bases: Sequence[Run], fixed: Sequence[Sequence[Run]]) -> Ratio | None:
    """Of tokens per second, over the fastest of the others by their medians over plain decoding: bases are its runs,
    and fixed those at each depth. None if there are none of these."""
    if not fixed:
        return None
    fastest = max((bases, *fixed), key=lambda each: _median(speed_ratio(each, bases)))
    return speed_ratio(runs, fastest)


def pace_ratio(runs: Sequence[Run], bases: Sequence[Run]) -> Ratio | None:
    """How many times as fast one request's tokens come: the base's median tpot over the run's."""
    medians = [[_tpot(run) for run in each] for each in (bases, runs)]
    return Ratio.of(list(zip(*medians, strict=True)))


def _median(ratio: Ratio | None) -> float:
    return 0.0 if ratio is None else ratio.median


def _tpot(run: Run) -> float | None:
    return Percentiles.of([each.tpot for each in run.answered if each.tpot is not None]).p50
