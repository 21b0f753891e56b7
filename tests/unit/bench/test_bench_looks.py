"""In a chart no drafter can be mistaken for another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from stridelm.bench.looks import FILLS, look_of, looks_of
from stridelm.draft import DRAFTERS


@dataclass
class Row:
    drafter: str
    label: str


KEPT = {name: look_of(name) for name in DRAFTERS}


@pytest.fixture
def more_drafters() -> Iterator[list[str]]:
    """Twelve drafters that users may add."""
    names = [f"a_new_one_{i}" for i in range(12)]
    for name in names:
        DRAFTERS.add(name, DRAFTERS.get("none"))
    yield names
    for name in names:
        DRAFTERS.remove(name)


@pytest.mark.parametrize("trait", ["color", "marker"])
@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_a_drafter_looks_like_no_other(drafter: str, trait: str) -> None:
    """Each registered drafter has a colour of its own and a marker of its own."""
    assert all(look_of(other)[trait] != look_of(drafter)[trait] for other in DRAFTERS if other != drafter)


@pytest.mark.parametrize("trait", ["color", "marker"])
def test_added_drafters_have_looks_of_their_own(more_drafters: list[str], trait: str) -> None:
    """And existing drafters keep theirs."""
    traits = [look_of(drafter)[trait] for drafter in DRAFTERS]
    assert len(set(traits)) == len(traits) >= 20
    assert all(look_of(drafter) == look for drafter, look in KEPT.items())


def test_a_look_does_not_depend_on_the_company() -> None:
    """A drafter's colour and marker do not depend on what else is drawn, or on the order; its variants differ."""
    rows = [Row(name, f"{name}{i}") for i in range(3) for name in DRAFTERS]
    for company in (rows, rows[::-1], rows[:2]):
        looks = looks_of(company, lambda row: row.label)
        assert len({tuple(look.items()) for look in looks.values()}) == len(company)
        for row in company:
            assert looks[row.label].items() >= look_of(row.drafter).items()
            assert looks[row.label]["fillstyle"] in FILLS


def test_matplotlib_knows_them() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    for look in looks_of([Row(name, name) for name in DRAFTERS for _ in FILLS], lambda row: row.label).values():
        axes.plot([1, 2], [1, 2], **look)
