"""A page is either free, held or cached."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stridelm.cache.pages import Pages

ACTIONS = st.lists(
    st.tuples(st.sampled_from(("take", "share", "drop", "name", "flush")), st.integers(0, 99)), max_size=60
)


@given(st.integers(1, 8), ACTIONS)
@settings(deadline=None)
def test_states(total: int, actions: list[tuple[str, int]]) -> None:
    """After any operations: each page is in one state, the null page in none, a name leads to a page that has it."""
    pages = Pages(total)
    held: list[int] = []
    for action, value in actions:
        if action == "take":
            count = value % (pages.available + 1)
            taken = pages.take(count)
            assert len(set(taken)) == count and not set(taken) & set(held) and 0 not in taken
            held += taken
        elif action == "share":
            page = pages.find(bytes([value % 7]))
            if page is not None:
                pages.share(page)
                held.append(page)
        elif action == "drop" and held:
            pages.drop([held.pop(value % len(held))])
        elif action == "name" and held:
            page = held[value % len(held)]
            if all(pages.find(bytes([n])) != page for n in range(7)):
                pages.name(page, bytes([value % 7]))
        elif action == "flush":
            pages.flush()
            assert pages.cached == 0 and pages.find(bytes([value % 7])) is None
        assert pages.free + pages.cached + pages.held == total
        assert pages.held == len(set(held))
        assert all(pages.holders(page) == held.count(page) for page in range(total + 1))


def test_first_page_keeps_the_name() -> None:
    """Two requests may compute the same page at once; the first is the one found."""
    pages = Pages(3)
    a, b = pages.take(2)
    pages.name(a, b"x")
    pages.name(b, b"x")
    assert pages.find(b"x") == a
    pages.drop([b])
    assert (pages.free, pages.cached) == (2, 0)
    pages.drop([a])
    assert (pages.free, pages.cached) == (2, 1) and pages.is_idle(a)


def test_cached_pages_are_given_last() -> None:
    """Free pages are taken before cached ones; an evicted page loses its name."""
    pages = Pages(3)
    taken = pages.take(3)
    for page in taken[:2]:
        pages.name(page, bytes([page]))
    pages.drop(taken)
    assert pages.take(1) == [taken[2]]
    assert pages.take(1) == [taken[0]] and pages.find(bytes([taken[0]])) is None
    assert pages.find(bytes([taken[1]])) == taken[1]
    with pytest.raises(AssertionError, match="2 pages requested, 1 available"):
        pages.take(2)
