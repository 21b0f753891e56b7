"""What steps with and without prompts cost, learnt from steps, and how many prompt rows a step gets."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from stridelm import SamplingParams
from stridelm.params import Speculation
from stridelm.schedule.counts import middle, stair
from stridelm.schedule.decode_times import OUTLIER
from stridelm.schedule.prompt_rows import LONGEST, PATIENCE, Timed
from stridelm.schedule.step_cost import StepCost
from stridelm.schedule.step_shape import StepShape
from stridelm.schedule.urgency import keep_pace
from stridelm.types import Request

BASE, EACH = 0.008, 22e-6
"""Seconds of a step without rows, and per row: about what an 8B model takes on an H100."""


def prompts(rows: int) -> StepShape:
    """Nobody decodes."""
    return StepShape(0, 0, 0, 0, rows)


def decodes(rows: int) -> StepShape:
    return StepShape(rows, rows, 0, 0)


def learnt(*rows: int, base: float = BASE, each: float = EACH) -> StepCost:
    cost = StepCost()
    for count in rows:
        cost.note(prompts(count), base + each * count)
    return cost


def test_the_line_is_found_from_two_sizes() -> None:
    cost = learnt(512, 8192)
    assert cost.one(prompts(2048)) == pytest.approx(BASE + EACH * 2048)
    assert cost.prompt_rows(decodes(0), 0.04) == pytest.approx((0.04 - BASE) / EACH, abs=1)
    assert cost.prompt_rows(decodes(0), BASE / 2) == 0


def test_steps_of_one_size_say_only_what_a_row_costs() -> None:
    cost = learnt(1000, 1010, 990)
    assert cost.one(prompts(2000)) == pytest.approx(2 * cost.one(prompts(1000)))


def test_the_line_follows_what_steps_take_later() -> None:
    """The device got twice as slow: after fifty steps little of the earlier times is left."""
    cost = learnt(*[512, 2048, 8192] * 20)
    rng = random.Random(0)
    for _ in range(50):
        count = rng.randint(100, 4000)
        cost.note(prompts(count), 2 * (BASE + EACH * count))
    assert cost.one(prompts(2048)) == pytest.approx(2 * (BASE + EACH * 2048), rel=0.1)


def test_one_delayed_step_hardly_counts() -> None:
    cost = learnt(*[512, 2048, 8192] * 5)
    before = cost.one(prompts(2048))
    cost.note(prompts(2048), 60.0)
    assert cost.one(prompts(2048)) < before * (1 + OUTLIER / 5)


def test_no_row_is_free_and_no_step_has_negative_time() -> None:
    """Steps that got shorter with more rows, by chance."""
    cost = StepCost()
    cost.note(prompts(500), 0.05)
    cost.note(prompts(1000), 0.02)
    assert 0 < cost.one(prompts(1)) < cost.one(prompts(500)) < cost.one(prompts(5000))


def test_a_step_has_the_prompt_rows_that_fit_into_the_target() -> None:
    policy = Timed(learnt(512, 8192), 0.04)
    few, many = policy.rows(decodes(1), 0), policy.rows(decodes(256), 0)
    assert BASE + EACH * (few + 1) == pytest.approx(0.04, rel=0.01)
    assert few - many == pytest.approx(255, abs=1)


def test_a_target_that_no_step_can_meet_still_lets_prompts_double_it() -> None:
    """1,024 rows that decode take 31 ms; with a target of 10 ms a prompt would get nothing, and wait for ever."""
    policy = Timed(learnt(512, 8192), 0.01)
    assert policy.rows(decodes(1024), 0) == pytest.approx((2 * (BASE + EACH * 1025) - BASE) / EACH - 1024, abs=2)


def test_nothing_is_held_back_before_anything_is_measured() -> None:
    assert Timed(StepCost(), 0.04).rows(decodes(8), 0) == math.inf


@pytest.mark.parametrize("seed", range(20))
def test_some_prompt_row_always_runs(seed: int) -> None:
    rng, cost = random.Random(seed), StepCost()
    for _ in range(30):
        cost.note(prompts(rng.randint(1, 8192)), rng.expovariate(10))
        assert Timed(cost, rng.expovariate(100)).rows(decodes(rng.randint(1, 2048)), 0) >= 1


def decode_seconds(rows: int, context: int = 0) -> float:
    """A stair after 64 rows; attention reads the context."""
    return 0.0044 + (0.0 if rows <= 64 else 0.004) + 20e-6 * rows + 1e-8 * context


def mixed() -> StepCost:
    """Learnt from decodes of several sizes and contexts, and from prompts beside them and alone."""
    cost, rng = StepCost(), random.Random(0)
    for turn in range(200):
        rows = rng.choice((8, 64, 128))
        context = 500 * rows + 1000 * turn
        cost.note(StepShape(rows, rows, 0, context), decode_seconds(rows, context))
    for _ in range(40):
        rows, prompt = rng.choice((0, 8, 64, 128)), rng.randint(50, 1000)
        decoding = decode_seconds(rows, 500 * rows) if rows else 0.0044
        cost.note(StepShape(rows, rows, 0, 500 * rows, prompt), decoding + 0.003 + EACH * prompt)
    return cost


@pytest.mark.parametrize("rows", [8, 64, 128])
def test_prompt_rows_come_on_top_of_what_decodes_are_known_to_take(rows: int) -> None:
    """With the stairs of the decodes and the tokens that they read: one table has both."""
    cost = mixed()
    for context in (500 * rows, 500 * rows + 150_000):
        step = StepShape(rows, rows, 0, context)
        assert cost.one(step) == pytest.approx(decode_seconds(rows, context), rel=0.05)
        expected = decode_seconds(rows, context) + 0.003 + EACH * 700
        assert cost.one(step.with_prompt(700)) == pytest.approx(expected, rel=0.05)
        fits = cost.prompt_rows(step, expected)
        assert fits == pytest.approx(700, rel=0.1)
        assert cost.one(step.with_prompt(fits)) <= expected < cost.one(step.with_prompt(fits + 2))


def test_steps_with_prompts_say_nothing_of_decodes() -> None:
    """However they vary, what a step without prompts is expected to take stays."""
    cost = mixed()
    before = cost.one(decodes(64))
    for prompt in range(100, 1100, 100):
        cost.note(StepShape(64, 64, 0, 0, prompt), 1.0)
    assert cost.one(decodes(64)) == before


def test_what_prompts_add_follows_what_decodes_take_by_now() -> None:
    """Prompts were measured alone, before any decode was: that step's fixed part is not counted twice later."""
    cost = learnt(512, 2048, 8192)
    for _ in range(20):
        for rows in (1, 16, 64):
            cost.note(decodes(rows), BASE + EACH * rows)
    assert cost.one(StepShape(16, 16, 0, 0, 1000)) == pytest.approx(BASE + EACH * 1016, rel=0.03)


def test_prompts_that_seem_to_take_no_time_are_not_free() -> None:
    """Steps that took no longer than decodes alone, by chance."""
    cost = StepCost()
    for _ in range(20):
        cost.note(decodes(8), 0.01)
    for _ in range(5):
        cost.note(StepShape(8, 8, 0, 0, 4), 0.009)
    assert 0 < cost.one(decodes(8)) < cost.one(StepShape(8, 8, 0, 0, 4))
    assert 0 < cost.prompt_rows(decodes(8), 0.02) < 1000


def test_steps_are_longer_only_while_more_waits_than_can_be_read_soon() -> None:
    """At most LONGEST times, and with no jump, so that the bound falls as the queue does."""
    policy, beside = Timed(learnt(512, 8192), 0.025), decodes(16)
    short = policy.rows(beside, 0)
    soon = int(short / 0.025 * PATIENCE)
    assert policy.rows(beside, soon // 2) == policy.rows(beside, soon - 1) == short
    bounds = [policy.rows(beside, waiting) for waiting in range(0, 10 * soon, soon // 50)]
    assert bounds == sorted(bounds) and max(b - a for a, b in pairwise(bounds)) < 0.05 * short
    assert BASE + EACH * (bounds[-1] + 16) == pytest.approx(LONGEST * 0.025, rel=0.01)
    assert policy.rows(beside, int(1.5 * soon)) == pytest.approx((1.5 * 0.025 - BASE) / EACH - 16, rel=0.02)


def test_slow_decodes_do_not_make_steps_longer_twice() -> None:
    """Where a step with hardly any prompt takes longer than the target, it may take twice that however many wait: the
    two reasons for longer steps do not multiply."""
    policy, beside = Timed(learnt(512, 8192), 0.0005), decodes(16)
    assert 2 * (BASE + EACH * 17) > LONGEST * 0.0005
    assert policy.rows(beside, 1_000_000) == policy.rows(beside, 0)


def test_the_first_step_that_tries_a_depth_says_little() -> None:
    """It takes longer than others like it: what it needs is loaded. Unless the second takes longer by much: that is all
    that is known for a while, and would be a delay."""
    cost, step = StepCost(), StepShape(1, 3, 2, 100)
    cost.note(step, 9e-3, tried=2)
    assert not cost.knows_decodes and cost.untried(1, 2) == 2
    cost.note(step, 3e-3, tried=2)
    assert cost.untried(1, 2) == 1
    assert cost.one(step) == pytest.approx(3e-3, rel=0.01)
    plain = StepShape(1, 1, 0, 100)
    for seconds in (2e-3, 5e-3):
        cost.note(plain, seconds, tried=0)
    assert cost.one(plain) == pytest.approx(2e-3, rel=0.1)


def test_the_first_step_says_nothing_of_one_with_more_requests() -> None:
    """Though both try the depth with about as many."""
    cost, few, many = StepCost(), StepShape(5, 5, 0, 100), StepShape(8, 8, 0, 160)
    cost.note(few, 2e-3, tried=0)
    cost.note(many, 5e-3, tried=0)
    assert cost.one(many) == pytest.approx(5e-3, rel=0.01)


def test_steps_that_grow_slower_are_not_taken_to_read_more() -> None:
    """A machine that is slower now and then makes a few tokens of context look dear, where contexts hardly differ."""
    cost = StepCost()
    for more in range(12):
        cost.note(StepShape(1, 1, 0, 50 + more), 1e-3 + 0.05e-3 * more)
    assert cost.one(StepShape(1, 1, 0, 0)) > 0.9e-3


@pytest.mark.parametrize("slower", [0.6, 1.6])
def test_a_slower_machine_is_slower_at_everything(slower: float) -> None:
    """Depths that are not tried meanwhile, too, for the most part, so that they do not look better for it than they
    are. Those that do differ from the others now are found out once they are tried again."""
    cost, plain, deep = StepCost(), StepShape(4, 4, 0, 900), StepShape(4, 12, 2, 900)
    for _ in range(12):
        cost.note(plain, 2e-3)
        cost.note(deep, 3e-3)
    for _ in range(60):
        cost.note(plain, slower * 2e-3)
    assert cost.one(plain) == pytest.approx(slower * 2e-3, rel=0.05)
    assert 0.5 < math.log(cost.one(deep) / 3e-3) / math.log(slower) <= 1
    for _ in range(12):
        cost.note(deep, 3e-3)
        cost.note(plain, slower * 2e-3)
    assert cost.one(deep) == pytest.approx(3e-3, rel=0.1)


def test_what_runs_often_does_not_look_cheap() -> None:
    """Where steps are delayed at random, the delays of a depth that always runs count as those of one that seldom
    does."""
    ratios = []
    for seed in range(20):
        rng, cost = random.Random(seed), StepCost()
        for step in range(300):
            shape, seconds = (StepShape(4, 12, 2, 900), 3e-3) if step % 150 < 2 else (StepShape(4, 4, 0, 900), 2e-3)
            cost.note(shape, seconds * math.exp(abs(rng.gauss(0, 0.8))))
        ratios.append(cost.one(StepShape(4, 12, 2, 900)) / cost.one(StepShape(4, 4, 0, 900)))
    assert statistics.median(ratios) == pytest.approx(1.5, rel=0.1)


def test_what_follows_another_kind_takes_longer_once() -> None:
    """A depth that is only tried now and then always comes after another one. By how much that takes longer is learnt
    from the steps of the kind that runs, and not laid to the depth."""
    cost, plain, deep = StepCost(), StepShape(4, 4, 0, 900), StepShape(4, 12, 2, 900)
    for _ in range(60):
        cost.note(deep, 1.2 * 3e-3)
        cost.note(plain, 1.2 * 2e-3)
        for _ in range(8):
            cost.note(plain, 2e-3)
    assert cost.switching == pytest.approx(0.2, abs=0.04)
    assert cost.one(deep) / cost.one(plain) == pytest.approx(1.5, rel=0.04)


def test_what_comes_after_what_is_learnt_apart() -> None:
    """A plain step takes longer by 30% after one that drafts and by 60% after a prompt, and one that drafts by 2% and
    by 20%: caches hold less of what it needs, and it needs more of it."""
    cost, plain, deep = StepCost(), StepShape(4, 4, 0, 900), StepShape(4, 12, 2, 900)
    prompt = StepShape(4, 4, 0, 900, 100)
    for _ in range(60):
        for shape, seconds, after in ((plain, 2e-3, 1.3), (prompt, 9e-3, 1), (plain, 2e-3, 1.6)):
            cost.note(shape, seconds * after)
            cost.note(shape, seconds)
        for shape, seconds, after in ((deep, 3e-3, 1.02), (prompt, 9e-3, 1), (deep, 3e-3, 1.2)):
            cost.note(shape, seconds * after)
            cost.note(shape, seconds)
    assert cost.knows_switching and cost.switching == pytest.approx(0.3, abs=0.03)
    assert cost.one(plain) == pytest.approx(2e-3, rel=0.02)
    assert cost.one(deep) == pytest.approx(3e-3, rel=0.02)


def test_a_step_after_one_that_catches_up_is_of_another_kind() -> None:
    cost, plain = StepCost(), StepShape(4, 4, 0, 900)
    for _ in range(60):
        cost.note(StepShape(4, 4, 0, 900, behind=70), 5e-3)
        cost.note(plain, 1.4 * 2e-3)
        for _ in range(3):
            cost.note(plain, 2e-3)
    assert cost.one(plain) == pytest.approx(2e-3, rel=0.02)


@pytest.mark.parametrize("times", [1, 3], ids=["a card", "a processor"])
def test_tokens_that_are_read_are_as_dear_as_a_step_has_rows(times: int) -> None:
    """A processor reads them once for each row. What they take the steps that run, which draft, is not what they take a
    plain one; where that did not tell, it is taken to be."""
    rng, cost = random.Random(0), StepCost()
    for step in range(2000):
        context = 600 + 7 * (step % 150)
        plain = step % 40 < 2 and (times > 1 or step < 50)
        shape = StepShape(4, 4, 0, context) if plain else StepShape(4, 12, 2, context)
        seconds = (2e-3 if plain else 3e-3) + (1 if plain else times) * 0.4e-6 * context
        cost.note(shape, seconds * rng.uniform(0.98, 1.02))
    for context in (600, 1600):
        assert cost.one(StepShape(4, 12, 2, context)) == pytest.approx(3e-3 + times * 0.4e-6 * context, rel=0.03)
        assert cost.one(StepShape(4, 4, 0, context)) == pytest.approx(2e-3 + 0.4e-6 * context, rel=0.05)


def test_catching_up_has_a_price_of_its_own() -> None:
    """In steps that draft nothing, and at least one: the steps themselves tell nothing else."""
    for seconds, steps in ((6e-3, 2.0), (2.2e-3, 1.0), (1.0, 8.0)):
        cost, plain = StepCost(), StepShape(4, 4, 0, 900)
        assert cost.catching_up == 1.0
        cost.note(StepShape(4, 4, 0, 900, behind=70), seconds)
        assert not cost.knows_decodes
        for _ in range(40):
            for _ in range(4):
                cost.note(plain, 2e-3)
            cost.note(StepShape(4, 4, 0, 900, behind=70), seconds)
        assert cost.catching_up == pytest.approx(steps, rel=0.05)
        assert cost.one(plain) == pytest.approx(2e-3, rel=0.01) and cost.switching == 0.0


def test_doubts_are_of_what_was_not_seen() -> None:
    rng = random.Random(0)
    cost, rows, depths = StepCost(), np.array([4, 8]), np.array([0, 1])
    for step in range(200):
        cost.note(StepShape(4, 4, 0, 900), 2e-3 * math.exp(rng.gauss(0, 0.1)))
        if step in (50, 100):
            cost.note(StepShape(4, 8, 1, 900), 3e-3)
    often, seldom = cost.doubts(4, rows, depths)
    [never] = cost.doubts(4, np.array([12]), np.array([2]))
    assert 0 < often < 0.5 * seldom < seldom < never == pytest.approx(0.1, rel=0.4)


def test_the_middle_of_counts_that_are_alike() -> None:
    alike: dict[int, list[int]] = {}
    for count in range(1, 257):
        alike.setdefault(stair(count), []).append(count)
    for counts in alike.values():
        assert {middle(count) for count in counts} == {statistics.mean(counts)}


@pytest.mark.parametrize(
    "step", [prompts(100), decodes(4), replace(decodes(4), behind=9)], ids=("prompt", "decode", "behind")
)
def test_a_step_that_took_no_time(step: StepShape) -> None:
    """The ticks of a clock may be longer than a step: it says nothing."""
    cost, other = StepCost(), StepCost()
    for seconds in (0.0, 1e-3, 0.0, 1e-3, 2e-3):
        for each in (cost, other):
            if seconds or each is cost:
                each.note(replace(step, behind=0), seconds)
                each.note(step, seconds)
    assert cost.one(step) == other.one(step) > 0.0


def test_a_pace_over_no_time() -> None:
    request = Request("", [0], SamplingParams(target_tps=50.0), Speculation())
    for seconds, pace in ((0.0, None), (0.1, 10.0), (0.0, 10.0)):
        keep_pace(request, 1, seconds)
        assert request.stats.pace == pace
