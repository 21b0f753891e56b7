"""Which cases `make test` runs."""

from __future__ import annotations

import random

import pytest

from support.quick import cover, name_of


@pytest.mark.parametrize("seed", range(5))
def test_every_value_is_shown(seed: int) -> None:
    """The cases kept have every value of every parameter; of a whole product as many as the longest parameter has."""
    draw = random.Random(seed)
    some = [tuple(draw.choice("abc") + str(n) for n in range(3)) for _ in range(20)]
    kept = [some[number] for number in cover(some)]
    assert {*map(frozenset, zip(*kept))} == {*map(frozenset, zip(*some))}
    product = [(a, b) for a in "abcde" for b in range(3)]
    assert len(cover(product)) == 5


def test_without_parameters() -> None:
    assert cover([()]) == [0]
    assert name_of("tests/laws/test_x.py::test_y[a-b[0]]") == "tests/laws/test_x.py::test_y"
