"""Writes structural tags (xgrammar's format: text with tags, and structure inside of them) as a grammar for llguidance.

A text that the tokenizer has a special token for, such as a marker of tool calls, is that token and no other: special
tokens are never matched as letters. Free text before a trigger or the end of a tag goes up to where that first occurs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stridelm.grammar.ebnf import ROOT, read_ebnf
from stridelm.grammar.expressions import ANYTHING, EMPTY, MAX_NESTING, Node, Ranges, overlap, pattern, sequence, text
from stridelm.grammar.json_schema import held_schema
from stridelm.grammar.lexemes import Positions, is_expression, written_out
from stridelm.grammar.python_regex import full_match
from stridelm.values import shortened

JSON_BEGINS: Ranges = ((9, 10), (13, 13), (32, 32), (34, 34), (45, 45), (48, 57), (91, 91), (102, 102), (110, 110)) + (
    (116, 116),
    (123, 123),
)
JSON_GOES_ON: Ranges = ((43, 43), (45, 46), (48, 57), (69, 69), (101, 101))
"""Characters that may continue a number, which could be all of a JSON value."""


@dataclass(frozen=True, slots=True)
class Term:
    """Something in llguidance's syntax. begins, goes_on: the characters that it may begin with, and those that could
    continue what is complete."""

    text: str
    begins: Ranges = ()
    goes_on: Ranges = ()


Piece = Node | Term


def structural_tag(tag: Any, special: Mapping[str, int]) -> str:
    """The grammar of a tag. special: text of each special token -> its id. Raises ValueError for what is not a tag, or
    cannot be followed."""
    if not isinstance(tag, dict):
        raise ValueError("it is not a JSON object")
    if "format" not in tag and "structures" in tag:
        tag = {"format": _legacy(tag)}
    writer = _Writer(special)
    start = writer.write(writer.read(tag.get("format"), 0))
    return "\n".join((f"start: {start}", *writer.rules))


class _Writer:
    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._markers = (
            re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        )
        self.rules: list[str] = []

    def read(self, given: Any, level: int) -> list[Piece]:
        if level > MAX_NESTING:
            raise ValueError(f"its formats are nested more than {MAX_NESTING} deep")
        if not isinstance(given, dict):
            raise ValueError(f"a format must be an object with a type; got {shortened(given)}")
        kind = given.get("type")
        reader = READERS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise ValueError(f"formats of type {shortened(kind)} cannot be followed; use {', '.join(READERS)}")
        return reader(self, given, level + 1)

    def write(self, pieces: Iterable[Piece]) -> str:
        """Pieces in order, as one line of a rule. Neighbouring expressions are one lexeme."""
        joined: list[Piece] = []
        for piece in pieces:
            if joined and not isinstance(piece, Term) and not isinstance(joined[-1], Term):
                joined[-1] = sequence((joined[-1], piece))
            elif piece != EMPTY:
                joined.append(piece)
        for one, other in pairwise(joined):
            if overlap(_goes_on(one), _begins(other)):
                raise ValueError("it is not clear where a part of it ends; put a text between it and the next")
        return " ".join(map(_written, joined)) or '""'

    def _rule(self, body: str, options: str = "") -> str:
        name = f"t{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _term(self, several: Sequence[list[Piece]], count: str = "") -> Term:
        """One of several, as a rule of its own."""
        lines = [self.write(pieces) for pieces in several]
        begins: Ranges = tuple(sorted(one for pieces in several for piece in pieces[:1] for one in _begins(piece)))
        goes_on: Ranges = tuple(sorted(one for pieces in several for piece in pieces[-1:] for one in _goes_on(piece)))
        return Term(f"({self._rule(' | '.join(lines))}){count}", begins, goes_on)

    def spoken(self, value: Any, name: str) -> list[Piece]:
        """A text, with its special tokens."""
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text; got {shortened(value)}")
        pieces: list[Piece] = []
        place = 0
        for found in self._markers.finditer(value) if self._markers else ():
            pieces += [text(value[place : found.start()]), Term(f"<[{self._special[found.group()]}]>")]
            place = found.end()
        return [piece for piece in (*pieces, text(value[place:])) if piece != EMPTY]

    def _const(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        return self.spoken(given.get("value"), "value")

    def _json(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        if given.get("style", "json") != "json":
            raise ValueError(f"json_schema: style {shortened(given['style'])} cannot be followed; use json")
        name = self._rule(f"%json {held_schema(json.dumps(given.get('json_schema')))}")
        return [Term(name, JSON_BEGINS, JSON_GOES_ON)]

    def _regex(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        if not isinstance(given.get("pattern"), str):
            raise ValueError("regex: pattern must be text")
        return [full_match(given["pattern"])]

    def _grammar(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        if not isinstance(given.get("grammar"), str):
            raise ValueError("grammar: grammar must be text")
        rules = written_out(read_ebnf(given["grammar"]))
        if not is_expression(rules[ROOT]):
            raise ValueError("a grammar within a tag may not have rules that lead to themselves")
        return [rules[ROOT]]

    def _free(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        if given.get("excludes"):
            raise ValueError("any_text: excludes cannot be followed; leave it out")
        return [ANYTHING]

    def _sequence(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        return [piece for one in _elements(given, "elements") for piece in self.read(one, level)]

    def _or(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        elements = _elements(given, "elements")
        _refuse_beginnings([one["begin"] for one in elements if isinstance(one.get("begin"), str)])
        return [self._term([self.read(one, level) for one in elements])]

    def _counted(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        count = {"optional": "?", "plus": "+", "star": "*"}[given["type"]]
        return [self._term([self.read(given.get("content"), level)], count)]

    def _token(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        token = given.get("token")
        if isinstance(token, str):
            token = self._special.get(token)
        if not isinstance(token, int) or token not in self._special.values():
            raise ValueError(f"token {shortened(given.get('token'))} is not a special token of this model")
        return [Term(f"<[{token}]>")]

    def _tag(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        return self._inside(given, given.get("begin"), level)

    def _inside(self, tag: Mapping[str, Any], begin: Any, level: int) -> list[Piece]:
        """A tag of which `begin` is still to come."""
        ends = tag.get("end")
        ends = ends if isinstance(ends, list) and ends else [ends]
        if len(ends) > 1:
            _refuse_beginnings([end for end in ends if isinstance(end, str)])
        content = self.read(tag.get("content"), level)
        if content[-1:] == [ANYTHING]:  # up to the first end
            finishes = [self._until(end) for end in ends]
            return [*self.spoken(begin, "begin"), *content[:-1], self._term([[one] for one in finishes])]
        last: list[Piece] = self.spoken(ends[0], "end")
        if len(ends) > 1:
            last = [self._term([self.spoken(end, "end") for end in ends])]
        return [*self.spoken(begin, "begin"), *content, *last]

    def _until(self, end: Any) -> Term:
        pieces = self.spoken(end, "end")
        if not pieces:
            return Term(self._rule(_written(ANYTHING)), JSON_BEGINS, ANYTHING.item.ranges)  # type: ignore[union-attr]
        first = pieces[0]
        if isinstance(first, Term):
            head = f"{_written(ANYTHING)} {first.text}"
        else:
            head = self._rule(_written(sequence((ANYTHING, first))), "[lazy]")
        return Term(self._rule(" ".join((head, *map(_written, pieces[1:])))))

    def _triggered(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        tags, triggers = _tags(given), given.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise ValueError("triggers must be a list of texts")
        if given.get("excludes"):
            raise ValueError("triggered_tags: excludes cannot be followed; leave it out")
        _refuse_beginnings(triggers)
        groups = []
        for trigger in triggers:
            own = [tag for tag in tags if tag["begin"].startswith(trigger)]
            _refuse_beginnings([tag["begin"] for tag in own])
            rests = [self._inside(tag, tag["begin"][len(trigger) :], level) for tag in own]
            if rests:
                groups.append((trigger, self._term(rests)))
        if any(not tag["begin"].startswith(tuple(triggers)) for tag in tags):
            raise ValueError("every tag's begin must start with one of the triggers")
        literal = [t for t in triggers if not isinstance(self.spoken(t, "trigger")[0], Term)]
        found = "|".join(pattern(text(trigger)) for trigger in literal)
        free = f"T{len(self.rules)}"
        self.rules.append(f"{free}: /(?s:.*)/" + (f" & ~/(?s:.*)(?:{found})(?s:.*)/" if literal else ""))
        calls = self._rule(" | ".join(f"{self._head(trigger, free)} {rest.text}" for trigger, rest in groups))
        at_once = self._rule(" | ".join(f"{self.write(self.spoken(t, 'trigger'))} {rest.text}" for t, rest in groups))
        first = at_once if given.get("at_least_one") else calls
        if given.get("stop_after_first"):
            whole = first if given.get("at_least_one") else f"({first} | {free}?)"
        else:
            whole = f"{at_once} {calls}* {free}?" if given.get("at_least_one") else f"{calls}* {free}?"
        return [Term(f"({whole})", ANYTHING.item.ranges, ANYTHING.item.ranges)]  # type: ignore[union-attr]

    def _head(self, trigger: str, free: str) -> str:
        """Free text up to a trigger, and the trigger."""
        pieces = self.spoken(trigger, "trigger")
        if isinstance(pieces[0], Term):
            return f"{free}? {self.write(pieces)}"
        if len(pieces) > 1:
            raise ValueError(f"trigger {shortened(trigger)} has a special token after other text; begin with it")
        return self._rule(_written(sequence((ANYTHING, pieces[0]))), "[lazy]")

    def _separated(self, given: Mapping[str, Any], level: int) -> list[Piece]:
        tags = _tags(given)
        _refuse_beginnings([tag["begin"] for tag in tags])
        one = self._term([self.read({"type": "tag", **tag}, level) for tag in tags])
        if given.get("stop_after_first"):
            body = one.text
        else:
            body = f"{one.text} ({self.write(self.spoken(given.get('separator'), 'separator'))} {one.text})*"
        name = self._rule(body)
        return [Term(name if given.get("at_least_one") else f"{name}?", one.begins, one.goes_on)]


Reader = Callable[[_Writer, Mapping[str, Any], int], list[Piece]]
READERS: Mapping[str, Reader] = {
    "const_string": _Writer._const,
    "json_schema": _Writer._json,
    "regex": _Writer._regex,
    "grammar": _Writer._grammar,
    "any_text": _Writer._free,
    "sequence": _Writer._sequence,
    "or": _Writer._or,
    "optional": _Writer._counted,
    "plus": _Writer._counted,
    "star": _Writer._counted,
    "token": _Writer._token,
    "tag": _Writer._tag,
    "triggered_tags": _Writer._triggered,
    "tags_with_separator": _Writer._separated,
}


def _legacy(tag: Mapping[str, Any]) -> dict[str, Any]:
    """xgrammar's first form: structures after triggers."""
    structures = _elements(tag, "structures")
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema")},
            "end": one.get("end"),
        }
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _elements(given: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    elements = given.get(name)
    if not isinstance(elements, list) or not elements or not all(isinstance(one, dict) for one in elements):
        raise ValueError(f"{name} must be a list of objects, at least one")
    return elements


def _tags(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    tags = _elements(given, "tags")
    if not all(tag.get("type", "tag") == "tag" and isinstance(tag.get("begin"), str) for tag in tags):
        raise ValueError("tags must be of type tag, each with a text as its begin")
    return tags


def _refuse_beginnings(begins: Sequence[str]) -> None:
    """Of two texts one of which begins the other, the longer one would always be taken."""
    ordered = sorted(begins)
    for one, other in pairwise(ordered):
        if other != one and other.startswith(one):
            raise ValueError(
                f"{shortened(one)} is the beginning of {shortened(other)}; make both as long as each other"
            )


def _begins(piece: Piece) -> Ranges:
    if isinstance(piece, Term):
        return piece.begins
    positions = Positions.of(piece)
    return ANYTHING.item.ranges if positions is None else positions.opening  # type: ignore[union-attr]


def _goes_on(piece: Piece) -> Ranges:
    """Characters by which something complete could go on."""
    if isinstance(piece, Term):
        return piece.goes_on
    positions = Positions.of(piece)
    return ANYTHING.item.ranges if positions is None else positions.extended_by(positions)[0]  # type: ignore[union-attr]


def _written(piece: Piece) -> str:
    if isinstance(piece, Term):
        return piece.text
    positions = Positions.of(piece)
    return f"/{pattern(piece)}/" + ("?" if positions is None or positions.nullable else "")
