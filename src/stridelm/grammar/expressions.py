"""Regular expressions and grammars over characters, as trees: what regexes, EBNF and choices are all read into.

A tree says what is matched and no more: it has no groups, flags or laziness, and every character is a code point. It is
written out in one unambiguous form (`pattern`), so that no text of a client is ever read by the syntax of a library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
"""Code points, as first and last of each range: sorted, apart from one another, without surrogates."""

LAST = 0x10FFFF
SURROGATES = 0xD800, 0xDFFF
MAX_NESTING = 100
"""Levels of groups in a regex or grammar. Readers and writers of trees call themselves once or twice per level."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of these."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concat:
    """All parts, one after another."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Either:
    """One of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The item at least and at most so often; most None: without end."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What the rule of this name matches."""

    name: str


Node = Chars | Concat | Either | Repeat | Rule

EMPTY = Concat()
NOTHING = Chars(())
"""Matches no text, not even an empty one."""
ANY = Chars(((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST)))
ANYTHING = Repeat(ANY, 0, None)
"""Any text."""


def ranges_of(codes: Iterable[tuple[int, int]]) -> Ranges:
    """These ranges, sorted, joined where they touch, without surrogates."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(codes):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    low, high = SURROGATES
    apart: list[tuple[int, int]] = []
    for first, last in joined:
        apart += [(a, b) for a, b in ((first, min(last, low - 1)), (max(first, high + 1), last)) if a <= b]
    return tuple(apart)


def complement(ranges: Ranges) -> Ranges:
    """All characters but these."""
    gaps, free = [], 0
    for first, last in ranges:
        gaps.append((free, first - 1))
        free = last + 1
    return ranges_of((a, b) for a, b in (*gaps, (free, LAST)) if a <= b)


def union(*several: Ranges) -> Ranges:
    return ranges_of(one for ranges in several for one in ranges)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    return complement(union(complement(one), complement(other)))


def overlap(one: Ranges, other: Ranges) -> bool:
    """Whether any character is in both."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][1] < other[j][0]:
            i += 1
        elif other[j][1] < one[i][0]:
            j += 1
        else:
            return True
    return False


def text(value: str) -> Node:
    """Exactly this text."""
    return sequence(Chars(((ord(character),) * 2,)) for character in value)


def sequence(parts: Iterable[Node]) -> Node:
    """The parts in order."""
    parts = tuple(parts)
    return parts[0] if len(parts) == 1 else Concat(parts)


def either(options: Sequence[Node]) -> Node:
    return options[0] if len(options) == 1 else Either(tuple(options))


def children(node: Node) -> Iterator[Node]:
    if isinstance(node, Concat):
        yield from node.parts
    elif isinstance(node, Either):
        yield from node.options
    elif isinstance(node, Repeat):
        yield node.item


def pattern(node: Node) -> str:
    """The tree in the syntax of Rust's `regex` crate, which llguidance reads. Holds no `/`, quote or line break."""
    if isinstance(node, Chars):
        return _chars(node)
    if isinstance(node, Concat):
        return "".join(_inner(part) for part in node.parts) or "(?:)"
    if isinstance(node, Either):
        return "|".join(map(pattern, node.options))
    assert isinstance(node, Repeat), "rules have no pattern"
    if node.most is None:
        count = {0: "*", 1: "+"}.get(node.least, f"{{{node.least},}}")
    else:
        count = "?" if (node.least, node.most) == (0, 1) else f"{{{node.least},{node.most}}}"
    return (pattern(node.item) if isinstance(node.item, Chars) else f"(?:{pattern(node.item)})") + count


def _inner(part: Node) -> str:
    return f"(?:{pattern(part)})" if isinstance(part, Either) else pattern(part)


def _chars(node: Chars) -> str:
    if node == ANY:
        return "(?s:.)"
    if not node.ranges:
        return "[^\\x{0}-\\x{10FFFF}]"
    if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return _code(node.ranges[0][0])
    return "[" + "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in node.ranges) + "]"


def _code(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:X}}}"
