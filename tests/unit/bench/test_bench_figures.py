"""Percentiles, times and acceptance by position, on timelines written by hand."""

from __future__ import annotations

import pytest

from stridelm.bench.drive import Timeline
from stridelm.bench.metrics import Acceptance, Percentiles, Times
from stridelm.params import SamplingParams, Speculation
from stridelm.stats import RequestStats
from stridelm.types import Request


def timeline(*emissions: tuple[float, int]) -> Timeline:
    """A finished request's emissions: (seconds, tokens) each."""
    return Timeline(Request("r", [1], SamplingParams(), Speculation()), 0.0, list(emissions))


def test_percentiles() -> None:
    assert Percentiles.of([1.0] * 50 + [2.0] * 51) == Percentiles(2.0, 2.0, 2.0)
    assert Percentiles.of([]) == Percentiles(None, None, None)


def test_times_of_steps_that_bring_several_tokens() -> None:
    """TTFT is the first emission, ITL the gaps between emissions, TPOT the time per token after the first."""
    times = Times.of([timeline((0.5, 1), (0.7, 2), (0.9, 2))])
    assert times.ttft_s.p50 == pytest.approx(0.5)
    assert times.itl_s.p50 == pytest.approx(0.2)
    assert times.tpot_s.p50 == pytest.approx(0.1)


def test_a_single_emission_has_no_rate() -> None:
    times = Times.of([timeline((0.5, 3))])
    assert times.tpot_s.p50 is None and times.itl_s.p50 is None


def test_acceptance_by_position() -> None:
    """Ten steps, eight with a draft: the first guess is right in six of eight, the second in three of six."""
    stats = [
        RequestStats(steps=6, drafted=10, accepted=6, accepted_at=[4, 2], reached_at=[5, 4]),
        RequestStats(steps=4, drafted=6, accepted=3, accepted_at=[2, 1], reached_at=[3, 2]),
    ]
    figures = Acceptance.of(19, stats)
    assert figures.tokens_per_step == pytest.approx(1.9)
    assert figures.coverage == pytest.approx(0.8)
    assert figures.conditional == pytest.approx((6 / 8, 3 / 6))
    assert figures.marginal == pytest.approx((6 / 8, 3 / 8))
    assert figures.tokens_per_step == pytest.approx(1 + figures.coverage * sum(figures.marginal))


def test_positions_that_were_reached_but_never_accepted_count() -> None:
    figures = Acceptance.of(4, [RequestStats(steps=4, drafted=4, reached_at=[4])])
    assert figures.conditional == (0.0,) and figures.marginal == (0.0,)


def test_plain_decoding_has_no_positions() -> None:
    figures = Acceptance.of(4, [RequestStats(steps=4)])
    assert (figures.tokens_per_step, figures.coverage, figures.conditional) == (1.0, 0.0, ())
