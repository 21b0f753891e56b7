"""What prompts cost, learnt from steps, and how many of their rows a step gets."""

from __future__ import annotations

import math
import random

import pytest

from stridelm.schedule.prompt_rows import Timed
from stridelm.schedule.step_cost import OUTLIER, StepCost

BASE, EACH = 0.008, 22e-6
"""Seconds of a step without rows, and per row: about what an 8B model takes on an H100."""


def learnt(*rows: int, base: float = BASE, each: float = EACH) -> StepCost:
    cost = StepCost()
    for count in rows:
        cost.note(count, base + each * count)
    return cost


def test_the_line_is_found_from_two_sizes() -> None:
    cost = learnt(512, 8192)
    assert cost.seconds(2048) == pytest.approx(BASE + EACH * 2048)
    assert cost.rows(0.04) == pytest.approx((0.04 - BASE) / EACH, abs=1)
    assert cost.rows(BASE / 2) == 0


def test_steps_of_one_size_say_only_what_a_row_costs() -> None:
    cost = learnt(1000, 1010, 990)
    assert cost.seconds(2000) == pytest.approx(2 * cost.seconds(1000))


def test_the_line_follows_what_steps_take_later() -> None:
    """The device got twice as slow: after fifty steps little of the earlier times is left."""
    cost = learnt(*[512, 2048, 8192] * 20)
    rng = random.Random(0)
    for _ in range(50):
        count = rng.randint(100, 4000)
        cost.note(count, 2 * (BASE + EACH * count))
    assert cost.seconds(2048) == pytest.approx(2 * (BASE + EACH * 2048), rel=0.1)


def test_one_delayed_step_hardly_counts() -> None:
    cost = learnt(*[512, 2048, 8192] * 5)
    before = cost.seconds(2048)
    cost.note(2048, 60.0)
    assert cost.seconds(2048) < before * (1 + OUTLIER / 5)


def test_no_row_is_free_and_no_step_has_negative_time() -> None:
    """Steps that got shorter with more rows, by chance."""
    cost = StepCost()
    cost.note(500, 0.05)
    cost.note(1000, 0.02)
    assert 0 < cost.seconds(1) < cost.seconds(500) < cost.seconds(5000)


def test_a_step_has_the_prompt_rows_that_fit_into_the_target() -> None:
    policy = Timed(learnt(512, 8192), 0.04)
    few, many = policy.rows(1), policy.rows(256)
    assert BASE + EACH * (few + 1) == pytest.approx(0.04, rel=0.01)
    assert few - many == pytest.approx(255, abs=1)


def test_a_target_that_no_step_can_meet_still_lets_prompts_double_it() -> None:
    """1,024 rows that decode take 31 ms; with a target of 10 ms a prompt would get nothing, and wait for ever."""
    policy = Timed(learnt(512, 8192), 0.01)
    assert policy.rows(1024) == pytest.approx((2 * (BASE + EACH * 1025) - BASE) / EACH - 1024, abs=2)


def test_nothing_is_held_back_before_anything_is_measured() -> None:
    assert Timed(StepCost(), 0.04).rows(8) == math.inf


@pytest.mark.parametrize("seed", range(20))
def test_some_prompt_row_always_runs(seed: int) -> None:
    rng, cost = random.Random(seed), StepCost()
    for _ in range(30):
        cost.note(rng.randint(1, 8192), rng.expovariate(10))
        assert Timed(cost, rng.expovariate(100)).rows(rng.randint(1, 2048)) >= 1
