"""The memory of captured steps is counted without a GPU's other tenants."""

from __future__ import annotations

from stridelm.run.graphs import MOST_OUTSIDE, taken

FREE, HELD = 60 << 30, 20 << 30


def test_own_and_the_drivers() -> None:
    """What torch reserved counts, and beside it what the driver keeps for the graph."""
    assert taken((FREE, HELD), (FREE - 7000, HELD + 5000)) == 7000


def test_another_process() -> None:
    """What another process takes from the card during a capture hardly counts, and what it returns counts nothing."""
    assert taken((FREE, HELD), (FREE - (8 << 30), HELD + 5000)) == 5000 + MOST_OUTSIDE
    assert taken((FREE, HELD), (FREE + (8 << 30), HELD + 5000)) == 5000


def test_nothing_was_taken() -> None:
    """A graph that fits into memory already held costs nothing."""
    assert taken((FREE, HELD), (FREE, HELD)) == 0
