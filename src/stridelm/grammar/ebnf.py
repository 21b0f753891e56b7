"""Reads EBNF as llama.cpp and xgrammar write it: `root ::= "(" root ")" | [a-z]+`.

Literals in double quotes and classes in brackets have the usual escapes (`\\n`, `\\x41`, `\\u00e9`, `\\U0001f44d`), and
`.` is any character. There are groups, `|`, `*`, `+`, `?`, `{2}`, `{2,}`, `{2,5}`, and comments from `#` to the end of
the line. A rule ends where the next one begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from stridelm.grammar.expressions import (
    ANY,
    EMPTY,
    MAX_NESTING,
    Chars,
    Node,
    Repeat,
    Rule,
    children,
    complement,
    either,
    ranges_of,
    sequence,
    text,
)

ROOT = "root"
MAX_COUNT = 100_000
"""Largest bound of a repeat."""
TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+|\#[^\n]*)
    |(?P<define>(?P<name>[A-Za-z_][\w.-]*)[ \t\r\n]*::=)
    |(?P<rule>[A-Za-z_][\w.-]*)
    |"(?P<literal>(?:[^"\\\n]|\\.)*)"
    |\[(?P<negated>\^?)(?P<members>(?:[^\]\\]|\\.)*)\]
    |\{(?P<least>\d+)(?:(?P<comma>,)(?P<most>\d*))?\}
    |(?P<mark>[().|*+?])""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
MEMBER = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|[^\\]", re.DOTALL)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "e": "\x1b"}


def read_ebnf(grammar: str) -> dict[str, Node]:
    """Rule name -> what it matches. Raises ValueError for text that is not such a grammar, or has no rule `root`."""
    rules = _Reader(grammar).rules()
    if ROOT not in rules:
        raise ValueError('it has no rule "root"')
    for name, node in rules.items():
        _check_names(name, node, rules)
    return rules


class _Reader:
    def __init__(self, grammar: str) -> None:
        self._tokens: list[re.Match[str]] = []
        self._grammar, at = grammar, 0
        while at < len(grammar):
            found = TOKEN.match(grammar, at)
            if found is None:
                if grammar[at] in "=!" and self._tokens and self._tokens[-1]["mark"] == "(":
                    raise ValueError("look-ahead cannot be followed; write the grammar without it")
                raise ValueError(f"line {grammar.count(chr(10), 0, at) + 1}: {grammar[at : at + 20]!r} cannot be read")
            at = found.end()
            if found["skip"] is None:
                self._tokens.append(found)
        self._tokens.reverse()

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._tokens:
            name = self._tokens.pop()["name"]
            if name is None or name in rules:
                raise ValueError("it must be a list of rules, name ::= ..., each name once")
            rules[name] = self._options(0)
            if self._tokens and self._tokens[-1]["define"] is None:
                raise ValueError(f"rule {name}: {self._tokens[-1].group()!r} has nothing that it belongs to")
        return rules

    def _options(self, level: int) -> Node:
        if level > MAX_NESTING:
            raise ValueError(f"its groups are nested more than {MAX_NESTING} deep")
        options = [self._parts(level)]
        while self._takes("|"):
            options.append(self._parts(level))
        return either(options)

    def _parts(self, level: int) -> Node:
        parts: list[Node] = []
        while self._tokens and self._tokens[-1]["define"] is None:
            if self._tokens[-1]["mark"] in ("|", ")"):
                break
            token = self._tokens.pop()
            parts.append(self._counted(self._single(token, level)))
        return sequence(parts)

    def _single(self, token: re.Match[str], level: int) -> Node:
        if token["mark"] == "(":
            inner = self._options(level + 1)
            if not self._takes(")"):
                raise ValueError("a parenthesis is not closed")
            return inner
        if token["rule"] is not None:
            return Rule(token["rule"])
        if token["literal"] is not None:
            return text("".join(_characters(token["literal"])))
        if token["members"] is not None:
            ranges = _class(token["members"])
            return Chars(complement(ranges) if token["negated"] else ranges)
        if token["mark"] == ".":
            return ANY
        raise ValueError(f"{token.group()!r} has nothing that it belongs to")

    def _counted(self, node: Node) -> Node:
        while self._tokens:
            token = self._tokens[-1]
            if token["mark"] in ("*", "+", "?"):
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[token["mark"]]
            elif token["least"] is not None:
                least = int(token["least"])
                most = least if token["comma"] is None else int(token["most"]) if token["most"] else None
                if max(least, most or 0) > MAX_COUNT or (most is not None and most < least):
                    raise ValueError(f"{token.group()} is not a count of repeats up to {MAX_COUNT}")
            else:
                break
            self._tokens.pop()
            node = EMPTY if most == 0 else Repeat(node, least, most)
        return node

    def _takes(self, mark: str) -> bool:
        if self._tokens and self._tokens[-1]["mark"] == mark:
            self._tokens.pop()
            return True
        return False


def _class(members: str) -> tuple[tuple[int, int], ...]:
    items = MEMBER.findall(members)
    codes = [ord(_character(item)) for item in items]
    ranges, place = [], 0
    while place < len(codes):
        if place + 2 < len(codes) and items[place + 1] == "-":
            first, last = codes[place], codes[place + 2]
            if first > last:
                raise ValueError(f"[{members[:40]}] has a range whose end comes before its beginning")
            ranges.append((first, last))
            place += 3
        else:
            ranges.append((codes[place], codes[place]))
            place += 1
    return ranges_of(ranges)


def _characters(literal: str) -> list[str]:
    return [_character(item) for item in MEMBER.findall(literal)]


def _character(item: str) -> str:
    if len(item) == 1:
        return item
    if item[1] in "xuU" and len(item) > 2:
        code = int(item[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"{item} is not a character")
        return chr(code)
    if item[1] in ESCAPES:
        return ESCAPES[item[1]]
    if item[1].isalnum():
        raise ValueError(f"{item} is not an escape that is known")
    return item[1]


def _check_names(name: str, node: Node, rules: Mapping[str, Node]) -> None:
    if isinstance(node, Rule) and node.name not in rules:
        raise ValueError(f"rule {name} names {node.name}, which is not defined")
    for child in children(node):
        _check_names(name, child, rules)
