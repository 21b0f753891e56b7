"""How many rows a step may have: never more than configured, never fewer than some request needs, in time all again."""

from __future__ import annotations

import random

import pytest

from stridelm.schedule.row_budget import MAX_PATIENCE, PATIENCE, RowBudget


def steps_until(rows: RowBudget, wanted: int) -> int:
    steps = 0
    while rows.now < wanted:
        rows.went_well()
        steps += 1
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_bounds(seed: int) -> None:
    rng = random.Random(seed)
    most, least = 2 ** rng.randrange(6, 14), rng.randint(1, 60)
    rows = RowBudget(most)
    rows.need(least)
    for _ in range(2000):
        before, failed = rows.now, rng.randint(1, rows.now)
        if rng.random() < 0.8:
            rows.went_well()
            assert before <= rows.now <= most
        elif rows.fall(failed):
            assert least <= rows.now < before and rows.now <= max(least, failed // 2)
        else:
            assert rows.now == before == least
    assert steps_until(rows, most) <= 14 * MAX_PATIENCE


def test_all_rows_come_back() -> None:
    rows = RowBudget(4096)
    assert rows.fall(1000) and rows.now == 500 and not rows.is_full
    assert steps_until(rows, 4096) == 4 * PATIENCE and rows.is_full


def test_a_rise_that_fails_is_tried_again_later() -> None:
    """Half as often each time, and as often as at first once all has gone well for as long."""
    rows = RowBudget(64)
    waits = []
    for _ in range(5):
        assert rows.fall(64) and rows.now == 32
        waits.append(steps_until(rows, 64))
    assert waits == [PATIENCE * 2**n for n in range(5)]
    for _ in range(waits[-1]):
        rows.went_well()
    assert rows.fall(64) and steps_until(rows, 64) == PATIENCE


def test_a_request_that_needs_more_rows_gets_them() -> None:
    rows = RowBudget(64)
    assert rows.fall(2) and rows.now == 1 and not rows.fall(1)
    rows.need(33)
    assert rows.now == 33 and not rows.fall(33)
