"""Figures of a load, on runs made by hand: vLLM's definitions, goodput, pairs of runs, and when requests arrive."""

from __future__ import annotations

import itertools
import random
import statistics
from typing import Any

import numpy as np
import pytest

from stridelm.bench.serving.figures import Figures, Percentiles, Ratio, pace_ratio, speed_ratio
from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.objective import Objective
from stridelm.bench.serving.record import Completion, Run


def completion(at: list[float], tokens: int, **more: Any) -> Completion:
    return Completion(at, tokens, prompt_tokens=10, text="", **more)


EVEN = completion([0.1, 0.2, 0.3], 3, steps=3, drafted=0, accepted=0)
DRAFTED = completion([0.2, 0.4, 0.8], 7, steps=3, drafted=8, accepted=4)
ONE = completion([0.5], 1, steps=1)


def test_definitions() -> None:
    """A request's times; tpot divides by all tokens but one, and a single token has none."""
    assert (EVEN.ttft, EVEN.latency) == (0.1, 0.3)
    assert EVEN.tpot == pytest.approx(0.1)
    assert DRAFTED.tpot == pytest.approx(0.1)
    assert ONE.tpot is None


def test_figures_are_over_all_requests_of_all_runs() -> None:
    figures = Figures.of([Run(1.0, (EVEN, DRAFTED)), Run(2.0, (ONE, None), errors=("lost",))])
    assert (figures.requests, figures.errors, figures.completion_tokens, figures.prompt_tokens) == (3, 1, 11, 30)
    assert figures.tokens_per_s == statistics.median([10.0, 0.5])
    assert figures.requests_per_s == statistics.median([2.0, 0.5]) and figures.seconds == 1.5
    assert figures.ttft_ms.p50 == pytest.approx(200)
    assert figures.tpot_ms.p50 == pytest.approx(100) and figures.tpot_ms.p99 == pytest.approx(100)
    assert figures.itl_ms.p50 == pytest.approx(150) and figures.itl_ms.p99 == pytest.approx(394)
    assert figures.e2el_ms.p95 == pytest.approx(1e3 * float(np.percentile([0.3, 0.8, 0.5], 95)))
    assert figures.tokens_per_step == 11 / 7 and figures.accepted_share == 0.5
    assert figures.goodput is figures.met_share is figures.client_busy is None


def test_what_a_server_does_not_report_is_not_made_up() -> None:
    """Steps of some requests only are as good as none."""
    figures = Figures.of([Run(1.0, (EVEN, completion([0.1], 4)))])
    assert figures.tokens_per_step is None and figures.accepted_share is None


def test_nothing_answered_has_no_times() -> None:
    figures = Figures.of([Run(1.0, (None,), ("refused",))], Objective(ttft=1))
    assert figures.requests == figures.tokens_per_s == figures.goodput == 0
    assert figures.ttft_ms.p50 is figures.itl_ms.p99 is figures.tokens_per_step is figures.met_share is None


@pytest.mark.parametrize(
    ("entries", "met"),
    [
        (["ttft=100"], [True, False, False]),
        (["ttft=200"], [True, True, False]),
        (["ttft=500", "e2el=500"], [True, False, True]),
        (["tpot=99"], [False, False, True]),
        (["tpot=100.1", "ttft=150"], [True, False, False]),
    ],
)
def test_goodput_counts_requests_that_meet_everything(entries: list[str], met: list[bool]) -> None:
    objective = Objective.of(entries)
    assert objective is not None
    assert [objective.met(each) for each in (EVEN, DRAFTED, ONE)] == met
    figures = Figures.of([Run(2.0, (EVEN, DRAFTED, ONE))], objective)
    assert figures.goodput == sum(met) / 2 and figures.met_share == sum(met) / 3


@pytest.mark.parametrize("entry", ["ttft", "ttft=", "latency=5", "tpot=-1", "tpot=nan", "ttft=inf", "=5"])
def test_objectives_that_cannot_be_read(entry: str) -> None:
    with pytest.raises(ValueError, match="cannot be read; write ttft=MS"):
        Objective.of([entry])


def test_an_objective_is_given_once() -> None:
    assert Objective.of([]) is None
    with pytest.raises(ValueError, match="at most once"):
        Objective.of(["ttft=1", "ttft=2"])


def test_ratios_are_of_pairs() -> None:
    """The second machine is twice as slow in its third pair, as its base is: the ratio does not see it."""
    runs = [Run(seconds, (DRAFTED,)) for seconds in (1.0, 1.25, 2.0)]
    bases = [Run(seconds, (DRAFTED,)) for seconds in (2.0, 2.0, 4.0)]
    ratio = speed_ratio(runs, bases)
    assert ratio is not None
    assert ratio.runs == pytest.approx((2.0, 1.6, 2.0)) and ratio.median == 2.0
    assert (ratio.low, ratio.high) == pytest.approx((1.6, 2.0))


def test_pace_is_how_fast_a_request_goes() -> None:
    """Although both runs take as long: with arrivals, their rate decides that."""
    slow = completion([0.1, 0.5], 3)
    ratio = pace_ratio([Run(1.0, (EVEN, ONE))], [Run(1.0, (slow,))])
    assert ratio is not None and ratio.median == pytest.approx(2.0)
    assert pace_ratio([Run(1.0, (ONE,))], [Run(1.0, (EVEN,))]) is None


def test_a_run_without_answers_has_no_ratio() -> None:
    assert speed_ratio([Run(1.0, (EVEN,)), Run(1.0, (None,), ("x",))], [Run(1.0, (EVEN,))] * 2) is None
    assert Ratio.of([]) is None


def test_arrivals_are_a_poisson_process_that_the_seed_fixes() -> None:
    load = Load(request_rate=4.0)
    times = load.arrivals(4000, 7)
    assert times is not None and times == load.arrivals(4000, 7) != load.arrivals(4000, 8)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0 and min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 4, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.1)
    assert times[:10] == load.arrivals(10, 7)
    assert Load(max_concurrency=4).arrivals(10, 7) is None


def test_loads_are_named() -> None:
    loads = [Load(1), Load(8), Load(request_rate=2.5), Load(request_rate=16.0)]
    assert [load.name for load in loads] == ["1 stream", "8 streams", "2.5 requests/s", "16 requests/s"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give one of the two"),
        ({"max_concurrency": 1, "request_rate": 1.0}, "give one of the two"),
        ({"max_concurrency": 0}, "at least 1"),
        ({"request_rate": 0.0}, "above 0"),
        ({"request_rate": float("inf")}, "max_concurrency"),
    ],
)
def test_loads_that_cannot_be(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Load(**given)


def test_percentiles_are_numpys() -> None:
    draw = random.Random(0)
    seconds = [draw.random() for _ in range(57)]
    found = Percentiles.of(seconds)
    assert (found.p50, found.p95, found.p99) == pytest.approx([1e3 * np.percentile(seconds, p) for p in (50, 95, 99)])
