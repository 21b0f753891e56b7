"""Names of pages: equal for equal prefixes, and only for those."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stridelm.cache.prefix import extend

TOKENS = st.lists(st.integers(0, 5), max_size=30)


def names(tokens: list[int], size: int) -> list[bytes]:
    out: list[bytes] = []
    extend(out, tokens, size)
    return out


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_equal_names_mean_equal_prefixes(a: list[int], b: list[int], size: int) -> None:
    """Page n has the same name in two requests if and only if all tokens up to its end are the same."""
    for page, (x, y) in enumerate(zip(names(a, size), names(b, size)), start=1):
        assert (x == y) == (a[: page * size] == b[: page * size])


@given(TOKENS, st.integers(0, 30), st.integers(1, 5))
def test_names_grow_with_tokens(tokens: list[int], first: int, size: int) -> None:
    """Naming pages in two calls gives the same as in one, and only full pages have names."""
    out: list[bytes] = []
    extend(out, tokens[:first], size)
    extend(out, tokens, size)
    assert out == names(tokens, size)
    assert len(out) == len(tokens) // size


def test_names_tell_large_ids_apart() -> None:
    """Token ids are hashed whole, not by their last byte."""
    assert len({tuple(names([token], 1)) for token in (1, 257, 65537, 2**31 + 1)}) == 4
