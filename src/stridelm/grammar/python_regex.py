"""Reads a regular expression as Python's `re` does, by its own parser, or refuses it.

What stands for a place instead of characters (look-around, word borders, back references, anchors in the middle) and
what changes with the way of matching (atomic groups, possessive repeats) is refused with its name. Laziness says
nothing about what may match and is dropped.

JSON schemas' patterns are ECMAScript's and may match anywhere (`search`). There a text has to match by both languages:
where a class differs, such as `\\d`, what both of them match is taken.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any

from stridelm.grammar.expressions import (
    ANY,
    ANYTHING,
    EMPTY,
    LAST,
    MAX_NESTING,
    Chars,
    Node,
    Ranges,
    Repeat,
    complement,
    either,
    intersection,
    ranges_of,
    sequence,
    union,
)

try:
    from re import _constants as codes
    from re import _parser as parser
except ImportError:  # Python 3.10
    import sre_constants as codes
    import sre_parse as parser

ECMA_BREAKS = ranges_of(((10, 10), (13, 13), (0x2028, 0x2029)))
ECMA_SPACE = ranges_of(
    ((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F))
    + ((0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))
)
WRITTEN = complement(ranges_of(((0, 7), (11, 11), (14, 31), (127, 127))))
"""Characters of JSON strings in outputs: all but the control characters that have no escape of one letter."""
ASCII_DIGIT: Ranges = ((48, 57),)
ASCII_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
ASCII_SPACE: Ranges = ((9, 13), (32, 32))
OTHER_IN_ECMA = re.compile(r"(?<!\\)(?:\\\\)*(?:\\[aAZ]|\[\^?\])")
"""Written the same in both languages, with another meaning: `\\a`, `\\A`, `\\Z`, and a class that begins with `]`."""
NAMES = {
    codes.ASSERT: "look-around",
    codes.ASSERT_NOT: "look-around",
    codes.GROUPREF: "a back reference",
    codes.GROUPREF_EXISTS: "a conditional group",
}
"""Of what cannot be followed."""


class Edge(Enum):
    """What lies on one side of a part of the expression."""

    INSIDE = 0
    """More of the expression."""
    END = 1
    """The end of the text."""
    OPEN = 2
    """Anything, unless an anchor says that it is the end of the text."""


def full_match(text: str) -> Node:
    """What `re.fullmatch` matches. Raises ValueError for what is not an expression, or cannot be followed."""
    return _Reader(text, ecma=False).read(Edge.END)


def search(text: str) -> Node:
    """Texts in which both `re.search` and ECMAScript find the expression, and that a JSON string of an output can hold
    (WRITTEN). Raises ValueError as `full_match`."""
    if OTHER_IN_ECMA.search(text):
        raise ValueError(r"\a, \A, \Z and classes that begin with ] mean one thing in Python and another in ECMAScript")
    return _Reader(text, ecma=True).read(Edge.OPEN)


class _Reader:
    def __init__(self, text: str, ecma: bool) -> None:
        self._ecma = ecma
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._tree = parser.parse(text)
        except RecursionError:
            raise ValueError(f"its groups are nested more than {MAX_NESTING} deep") from None
        except (re.error, OverflowError) as error:
            raise ValueError(f"it is not a regular expression ({error})") from error

    def read(self, edge: Edge) -> Node:
        return self._sequence(self._tree, self._tree.state.flags, (edge, edge), 0)

    def _sequence(self, items: Any, flags: int, edges: tuple[Edge, Edge], level: int) -> Node:
        """edges: what lies before and after the items."""
        if level > MAX_NESTING:
            raise ValueError(f"its groups are nested more than {MAX_NESTING} deep")
        if flags & (re.IGNORECASE | re.LOCALE):
            raise ValueError("the flags i and L cannot be followed; write out both cases, as in [aA]")
        self._refuse_anchors_of_lines(items, flags)
        items, before = self._strip(list(items), 0, edges[0], (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING))
        items, after = self._strip(items, -1, edges[1], (codes.AT_END, codes.AT_END_STRING))
        parts = []
        for place, (code, value) in enumerate(items):
            own = before if place == 0 else Edge.INSIDE, after if place == len(items) - 1 else Edge.INSIDE
            parts.append(self._item(code, value, flags, own, level))
        return sequence(parts) if items else _padded(EMPTY, (before, after))

    def _strip(self, items: list[Any], place: int, edge: Edge, anchors: Sequence[Any]) -> tuple[list[Any], Edge]:
        """The items without the anchors at one end, and what lies there then."""
        while items and items[place][0] is codes.AT and items[place][1] in anchors and edge is not Edge.INSIDE:
            items, edge = (items[1:] if place == 0 else items[:-1]), Edge.END
        return items, edge

    def _item(self, code: Any, value: Any, flags: int, edges: tuple[Edge, Edge], level: int) -> Node:
        if code is codes.SUBPATTERN:
            _, added, removed, items = value
            return self._sequence(items, (flags | added) & ~removed, edges, level + 1)
        if code is codes.BRANCH:
            return either([self._sequence(items, flags, edges, level + 1) for items in value[1]])
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, items = value
            inner = self._sequence(items, flags, (Edge.INSIDE, Edge.INSIDE), level + 1)
            return _padded(Repeat(inner, least, None if most is codes.MAXREPEAT else int(most)), edges)
        if code is codes.AT:
            raise ValueError("an anchor or a word border within the expression cannot be followed; leave it out")
        if code in NAMES:
            raise ValueError(f"{NAMES[code]} cannot be followed; write the expression without it")
        characters = self._characters(code, value, flags)
        if characters is None:
            raise ValueError("an atomic group or a possessive repeat cannot be followed; use an ordinary one")
        if self._ecma and characters:
            characters = intersection(characters, WRITTEN)
            if not characters:
                raise ValueError("a control character is part of it, which outputs never hold")
        return _padded(Chars(characters), edges)

    def _refuse_anchors_of_lines(self, items: Any, flags: int) -> None:
        if flags & re.MULTILINE and any(code is codes.AT for code, _ in items):
            raise ValueError("anchors under the flag m cannot be followed; leave the flag out")

    def _characters(self, code: Any, value: Any, flags: int) -> Ranges | None:
        """The characters that an item stands for; None for an item that is of another kind."""
        if code is codes.LITERAL:
            return ranges_of(((value, value),))
        if code is codes.NOT_LITERAL:
            return complement(ranges_of(((value, value),)))
        if code is codes.ANY:
            if flags & re.DOTALL:
                return ANY.ranges
            return complement(ECMA_BREAKS if self._ecma else ((10, 10),))
        if code is codes.RANGE:
            return ranges_of((value,))
        if code is codes.CATEGORY:
            return self._category(value, flags)
        if code is codes.IN:
            negated = value[0][0] is codes.NEGATE
            members = [self._characters(code, value, flags) for code, value in value[1 if negated else 0 :]]
            found = union(*(member for member in members if member is not None))
            return complement(found) if negated else found
        return None

    def _category(self, category: Any, flags: int) -> Ranges:
        name = str(category).rpartition("_")[2].lower()
        unicode = {"digit": _digits, "space": _spaces, "word": _words}[name]()
        ascii = {"digit": ASCII_DIGIT, "space": ASCII_SPACE, "word": ASCII_WORD}[name]
        ecma = ECMA_SPACE if name == "space" else ascii
        python = ascii if flags & re.ASCII else unicode
        if "NOT" in str(category):
            return complement(union(python, ecma) if self._ecma else python)
        return intersection(python, ecma) if self._ecma else python


def _padded(node: Node, edges: tuple[Edge, Edge]) -> Node:
    """With anything on the sides that are open."""
    before, after = (ANYTHING if edge is Edge.OPEN else EMPTY for edge in edges)
    return sequence((before, node, after))


@cache
def _digits() -> Ranges:
    return _where(str.isdecimal)


@cache
def _spaces() -> Ranges:
    return _where(str.isspace)


@cache
def _words() -> Ranges:
    return _where(lambda character: character.isalnum() or character == "_")


def _where(holds: Callable[[str], bool]) -> Ranges:
    return ranges_of((code, code) for code in range(LAST + 1) if holds(chr(code)))
