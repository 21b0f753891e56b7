"""How memory moves between page groups: what is lacking and a margin, from what others can spare."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stridelm.cache.split import KEPT, MARGIN, GroupPages, most_pages, split

SHORT = GroupPages(total=100, most=1000, free=0, cached=0, lacking=10)
DONOR = GroupPages(total=400, most=1000, free=300, cached=50, lacking=-350)
BUDGET = 500
"""Bytes; a page takes one."""


def totals(short: GroupPages = SHORT, donor: GroupPages = DONOR, *, stuck: bool = False) -> tuple[int, int] | None:
    found = split({"short": short, "donor": donor}, BUDGET, stuck=stuck)
    return None if found is None else (found["short"], found["donor"])


def test_what_is_lacking_and_as_many_again() -> None:
    assert totals() == (120, 380)
    assert totals(replace(SHORT, total=100 * MARGIN, most=10**6, lacking=1), replace(DONOR, free=399)) is None
    larger = split(
        {"short": replace(SHORT, total=64 * MARGIN, most=10**6, lacking=1), "donor": DONOR}, 400 + 64 * MARGIN
    )
    assert larger == {"short": 64 * MARGIN + 1 + 64, "donor": 400 - 65}


def test_nothing_moves_unless_it_helps() -> None:
    """All that is lacking, or nothing: and nothing where nothing is lacking."""
    assert totals(replace(SHORT, lacking=0)) is None
    assert totals(replace(SHORT, lacking=351)) is None
    assert totals(replace(SHORT, most=109)) is None
    assert totals(replace(SHORT, most=115)) == (115, 385)
    assert totals(SHORT, replace(DONOR, lacking=1)) is None


def test_unused_memory_comes_first() -> None:
    """What no group takes is given before any page."""
    assert split({"short": SHORT, "donor": DONOR}, 600) == {"short": 120, "donor": 400}
    assert split({"short": SHORT, "donor": DONOR}, 515) == {"short": 120, "donor": 395}


@pytest.mark.parametrize(
    ("change", "spare"),
    [
        ({}, 350 - 400 // KEPT),
        ({"lacking": -100}, 100 - 400 // KEPT),
        ({"reserved": 200}, 150 - 400 // KEPT),
        ({"kept": 60}, 350 - 60),
        ({"rests": True}, 0),
        ({"reserved": 360}, 0),
    ],
    ids=str,
)
def test_what_a_donor_can_spare(change: dict[str, int], spare: int) -> None:
    """Not what the next request or the running ones need of it, nor what it keeps; nothing, if it was just given
    pages."""
    donor = replace(DONOR, **change)  # type: ignore[arg-type]
    for lacking in (spare, spare + 1):
        found = totals(replace(SHORT, lacking=lacking), donor) if lacking else None
        assert found == ((100 + spare, 400 - spare) if lacking == spare and lacking else None)


def test_stuck_takes_all_but_what_the_next_needs() -> None:
    """Where nothing could run otherwise, nothing is kept back."""
    donor = replace(DONOR, rests=True, reserved=500, lacking=-340)
    assert totals(replace(SHORT, lacking=340), donor) is None
    assert totals(replace(SHORT, lacking=340), donor, stuck=True) == (440, 60)
    assert totals(replace(SHORT, lacking=341), donor, stuck=True) is None


def test_free_pages_before_cached_ones() -> None:
    """Of all donors: a cached page leaves only when no donor can spare a free one."""
    one = GroupPages(total=160, most=1000, free=20, cached=80, lacking=-100)
    other = replace(one, free=40, cached=20, lacking=-60)
    for lacking, left in ((20, (140, 140)), (30, (140, 120)), (60, (80, 120)), (60 + 4, (72, 120))):
        found = split({"short": replace(SHORT, lacking=lacking), "one": one, "other": other}, 420)
        assert found is not None and (found["one"], found["other"]) == left, (lacking, found)


def test_whole_chunks() -> None:
    """Memory that is taken in chunks moves in chunks, and the group that was short uses all of what it got."""
    short = replace(SHORT, bytes_at=lambda pages: -(-pages // 64) * 64 * 3)
    donor = replace(DONOR, bytes_at=lambda pages: -(-pages // 32) * 32 * 2)
    budget = short.bytes_at(100) + donor.bytes_at(400)
    found = split({"short": short, "donor": donor}, budget)
    assert found == {"short": 120, "donor": 400}, "its last chunk had room"
    found = split({"short": replace(short, lacking=40), "donor": donor}, budget)
    assert found is not None
    assert found["short"] == 180 and found["donor"] % 32 == 0
    assert short.bytes_at(180) + donor.bytes_at(found["donor"]) <= budget


def test_it_does_not_swing() -> None:
    """After a move, the reverse needs a donor that no longer rests and has more to spare than it keeps."""
    first = totals()
    assert first is not None
    now = replace(DONOR, total=first[1], lacking=10, free=0, cached=0)
    given = GroupPages(first[0], 1000, free=10, cached=0, lacking=-10)
    assert split({"short": now, "donor": replace(given, rests=True)}, BUDGET) is None
    assert split({"short": now, "donor": given}, BUDGET) is None, "it keeps a part"


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[str, GroupPages], int, bool]:
    groups = {}
    for number in range(draw(st.integers(2, 4))):
        total = draw(st.integers(1, 200))
        free = draw(st.integers(0, total))
        cached = draw(st.integers(0, total - free))
        chunk, page = draw(st.integers(1, 50)), draw(st.integers(1, 9))
        groups[str(number)] = GroupPages(
            total=total,
            most=draw(st.integers(total, 400)),
            free=free,
            cached=cached,
            lacking=draw(st.integers(-free - cached, 60)),
            reserved=draw(st.integers(0, 100)),
            rests=draw(st.booleans()),
            bytes_at=lambda pages, c=chunk, p=page: -(-(pages + 1) * p // c) * c,  # type: ignore[misc]
        )
    used = sum(group.bytes_at(group.total) for group in groups.values())
    return groups, used + draw(st.integers(0, 100)), draw(st.booleans())


@given(situations())
@settings(deadline=None, max_examples=400)
def test_whatever_the_numbers(situation: tuple[dict[str, GroupPages], int, bool]) -> None:
    """Memory is never exceeded, nobody is left lacking, no donor gives more than it can spare, and equal numbers give
    equal decisions."""
    groups, budget, stuck = situation
    found = split(groups, budget, stuck=stuck)
    assert found == split(groups, budget, stuck=stuck)
    if found is None:
        return
    assert sum(group.bytes_at(found[name]) for name, group in groups.items()) <= budget
    for name, group in groups.items():
        if group.lacking > 0:
            assert group.total + group.lacking <= found[name] <= group.most
        else:
            assert max(1, group.total - group.spare(stuck)) <= found[name] <= group.total
            assert group.total - found[name] <= group.free + group.cached


def test_most_pages() -> None:
    """A group's pages if the others have what they need, no more than it may ever have."""
    sizes = {"a": 2, "b": 3}
    most = most_pages({"a": 4, "b": 5}, {"a": 100, "b": 10}, 60, lambda group, pages: sizes[group] * pages)
    assert most == {"a": 22, "b": 10}
    assert most_pages({"a": 4, "b": 30}, {"a": 100, "b": 100}, 60, lambda group, n: sizes[group] * n)["a"] == 0
