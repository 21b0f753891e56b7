"""A stop string is found however the text is split, always the same one, and none of it is emitted."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stridelm.text.stops import StopStrings

LAWS = settings(max_examples=400, deadline=None)
words = st.text(alphabet="abc", min_size=1, max_size=5)
stop_lists = st.lists(words, max_size=5)
texts = st.text(alphabet="abcd", max_size=40)
cuts = st.lists(st.integers(0, 6), max_size=20)


def pieces(text: str, sizes: list[int]) -> list[str]:
    out, at = [], 0
    for size in sizes:
        out.append(text[at : at + size])
        at += size
    return [*out, text[at:]]


def search(stops: list[str], text: str) -> tuple[int, int, str] | None:
    """The plain definition: complete first, then first in the list. Returns (start, end, stop)."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), end, stop
    return None


@LAWS
@given(stops=stop_lists, text=texts, sizes=cuts, include=st.booleans())
def test_pieces_do_not_matter(stops: list[str], text: str, sizes: list[int], include: bool) -> None:
    """The emitted text, the match and its end are those of the definition over the whole text."""
    found = search(stops, text)
    stopper, out, matched = StopStrings(stops, include), "", None
    for piece in pieces(text, sizes):
        safe, matched = stopper.push(piece)
        out += safe
        if matched:
            break
    out += stopper.flush()
    if found is None:
        assert (out, matched, stopper.end) == (text, None, None)
    else:
        start, end, stop = found
        assert (out, matched, stopper.end) == (text[: end if include else start], stop, end)
        assert stopper.matched == stop


@LAWS
@given(stops=stop_lists, text=texts, sizes=cuts)
def test_holds_back_what_may_be_a_stop_and_no_more(stops: list[str], text: str, sizes: list[int]) -> None:
    """Held is the longest suffix that begins a stop string; without one, nothing."""
    stopper, read, out = StopStrings(stops), "", ""
    for piece in pieces(text, sizes):
        safe, matched = stopper.push(piece)
        if matched:
            return
        read, out = read + piece, out + safe
        begun = [n for n in range(len(read) + 1) if any(s.startswith(read[len(read) - n :]) for s in stops)]
        assert out == read[: len(read) - max(begun, default=0)]


@LAWS
@given(stops=stop_lists, text=texts, sizes=cuts, least=st.integers(0, 20))
def test_disarmed_text_ends_nothing(stops: list[str], text: str, sizes: list[int], least: int) -> None:
    """Stops that end before `least` characters are ignored; one that begins there may end after."""
    early, late = text[:least], text[least:]
    ends = [e for e in range(len(early) + 1, len(text) + 1) if any(text[:e].endswith(s) for s in stops)]
    stopper = StopStrings(stops, include=True)
    out = "".join(stopper.push(piece, armed=False)[0] for piece in pieces(early, sizes))
    safe, _ = stopper.push(late)
    assert stopper.end == (ends[0] if ends else None)
    assert out + safe + stopper.flush() == text[: ends[0] if ends else len(text)]


@pytest.mark.parametrize(
    ("stops", "text", "out", "matched"),
    [
        (["\n\n"], "a\n\nb", "a", "\n\n"),
        (["bcd", "c"], "abcd", "ab", "c"),  # complete first, though the other began earlier
        (["c", "bc"], "abcd", "ab", "c"),  # complete together: the first in the list
        (["bc", "c"], "abcd", "a", "bc"),
        (["aab"], "aaab", "a", "aab"),
        (["ab", "ab"], "ab", "", "ab"),
        ([], "abc", "abc", None),
    ],
)
def test_examples(stops: list[str], text: str, out: str, matched: str | None) -> None:
    stopper = StopStrings(stops)
    safe, match = stopper.push(text)
    assert (safe + stopper.flush(), match) == (out, matched)


def test_many_stops_cost_as_much_as_one() -> None:
    stopper = StopStrings([f"stop number {i} of many" for i in range(10_000)])
    start = time.perf_counter()
    for _ in range(1000):
        stopper.push("def stop number of")
    assert time.perf_counter() - start < 2.0


def test_nothing_after_a_match() -> None:
    stopper = StopStrings(["b"])
    stopper.push("ab")
    with pytest.raises(AssertionError):
        stopper.push("c")


def test_samples_share_the_automaton() -> None:
    """It is built once for requests with the same stop strings, and their searches are independent."""
    one, other = StopStrings(["ab", "cd"]), StopStrings(["ab", "cd"], include=True)
    assert one._automaton is other._automaton
    assert one.push("a") == ("", None) and other.push("c") == ("", None)
    assert one.push("d") == ("ad", None) and other.push("d") == ("cd", "cd")
