"""Buckets by distinct 4-grams, and what counts as a loop."""

from __future__ import annotations

import pytest

from stridelm.bench.repetition import LOOPING, MIXED, VARIED, bucket_of, distinct_share, loop_start


def test_share_of_distinct_grams() -> None:
    assert distinct_share(range(20)) == 1.0
    assert distinct_share([7] * 20) == pytest.approx(1 / 17)
    assert distinct_share(range(8)) is None


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        ([1] * 40, LOOPING),
        ([1, 2, 3, 4] * 5, LOOPING),
        ([*range(12), *[9] * 16], MIXED),
        (list(range(40)), VARIED),
    ],
)
def test_buckets(tokens: list[int], bucket: object) -> None:
    assert bucket_of(tokens) is bucket


def test_the_middle_bucket_has_both_its_edges() -> None:
    """103 tokens have 100 4-grams: 60 distinct ones still count as the middle bucket, and so do 30."""
    sixty = [*range(60), *[59] * 43]
    assert distinct_share(sixty) == pytest.approx(0.6) and bucket_of(sixty) is MIXED
    thirty = [*range(30), *[29] * 73]
    assert distinct_share(thirty) == pytest.approx(0.3) and bucket_of(thirty) is MIXED


def test_too_short_is_in_no_bucket() -> None:
    assert bucket_of([1] * 10) is None


def test_a_loop_begins_where_its_first_round_does() -> None:
    assert loop_start([*range(100, 110), *[1, 2, 3] * 9]) == 10


def test_one_token_over_and_over_is_a_loop() -> None:
    assert loop_start([5] * 24) == 0
    assert loop_start([5] * 23) is None


def test_two_rounds_are_no_loop() -> None:
    assert loop_start(list(range(20)) * 2) is None
    assert loop_start(list(range(20)) * 3) == 0


def test_a_loop_that_was_left_is_none() -> None:
    assert loop_start([*[1, 2] * 20, 3]) is None
    assert loop_start([]) is None
