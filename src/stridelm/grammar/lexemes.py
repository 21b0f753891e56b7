"""Writes rules over characters as a grammar over lexemes, for llguidance, which says exactly the same.

llguidance splits a text into lexemes greedily: each goes on for as long as any lexeme that may stand there can, and it
never looks back. That makes masks fast, and it changes what a grammar says if a lexeme could have ended earlier for the
sake of what follows: `[a-z]+ "x"` would match nothing. So expressions without recursion are lexemes only where that
cannot happen, and single characters elsewhere, which have one length and are always exact, but slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from stridelm.grammar.ebnf import ROOT
from stridelm.grammar.expressions import (
    EMPTY,
    NOTHING,
    Chars,
    Concat,
    Either,
    Node,
    Ranges,
    Repeat,
    Rule,
    children,
    either,
    overlap,
    pattern,
    sequence,
    union,
)

MAX_NODES = 20_000
"""Size that expressions may reach when rules are written out in them."""
MAX_ALL_RULES, MAX_RULES = 500, 200
"""Rules, and those of them that are left once all others are written out: llguidance calls itself for each."""
MAX_TERMS = 200
"""Lexemes of a grammar; one that would have more is read character by character."""
MAX_WORK = 300_000
"""Of the search for lexemes, some 0.5 s; a grammar that takes more is read character by character. It runs in the
engine's process too, and holds the interpreter's lock."""
MAX_POSITIONS = 128
"""Positions of an expression that is checked for use as a lexeme."""


def lark(rules: Mapping[str, Node]) -> str:
    """The rules as llguidance reads them, `root` as its `start`. Raises ValueError if they are too large."""
    rules = written_out(rules)
    whole = rules[ROOT]
    if not any(isinstance(node, Rule) for node in _nodes(whole)):
        return f"start: /{pattern(whole)}/"
    return _Writer(rules).text()


def written_out(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules that lead to themselves, and `root`, with all others put in their places, and none that never ends."""
    if len(rules) > MAX_ALL_RULES:
        raise ValueError(f"it has more than {MAX_ALL_RULES} rules; make it simpler")
    ends = _ending(rules)
    if ROOT not in ends:
        raise ValueError("nothing can match it: its rules have no end")
    recursive = _recursive(rules)
    if len(recursive) > MAX_RULES:
        raise ValueError(f"more than {MAX_RULES} of its rules lead to one another; make it simpler")
    done: dict[str, Node] = {}
    size = 0

    def put(node: Node) -> Node:
        nonlocal size
        size += 1
        if size > MAX_NODES:
            raise ValueError(f"its rules, written out, have more than {MAX_NODES} parts; make it simpler")
        if isinstance(node, Rule):
            if node.name not in ends:
                return NOTHING
            if node.name in recursive:
                return node
            if node.name not in done:
                done[node.name] = put(rules[node.name])
            size += sum(1 for _ in _nodes(done[node.name]))
            return done[node.name]
        # What leads to nothing is no beginning of an output: a sequence with such a part is nothing itself.
        if isinstance(node, Concat):
            parts = [put(part) for part in node.parts]
            return NOTHING if NOTHING in parts else sequence(parts)
        if isinstance(node, Either):
            options = [option for option in map(put, node.options) if option != NOTHING]
            return either(options) if options else NOTHING
        if isinstance(node, Repeat):
            item = put(node.item)
            nothing = NOTHING if node.least else EMPTY
            return nothing if item == NOTHING else Repeat(item, node.least, node.most)
        return node

    return {name: put(rules[name]) for name in rules if name in ends and (name in recursive or name == ROOT)}


def _ending(rules: Mapping[str, Node]) -> set[str]:
    """The rules that match any text at all."""
    ending: set[str] = set()

    def ends(node: Node) -> bool:
        if isinstance(node, Rule):
            return node.name in ending
        if isinstance(node, Concat):
            return all(map(ends, node.parts))
        if isinstance(node, Either):
            return any(map(ends, node.options))
        return node.least == 0 or ends(node.item) if isinstance(node, Repeat) else bool(node.ranges)

    while more := {name for name, node in rules.items() if name not in ending and ends(node)}:
        ending |= more
    return ending


def _recursive(rules: Mapping[str, Node]) -> set[str]:
    """The rules that lead to themselves, and those that lead to such."""
    used = {name: {one.name for one in _nodes(node) if isinstance(one, Rule)} for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, others in used.items():
        for other in others:
            users[other].append(name)
    free = [name for name, others in used.items() if not others]
    while free:
        done = free.pop()
        for name in users[done]:
            used[name].discard(done)
            if not used[name]:
                free.append(name)
    return {name for name, others in used.items() if others}


def _nodes(node: Node) -> Iterator[Node]:
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += children(node)


class _Writer:
    """Writes rules whose expressions are lexemes as large as may be: terms. A term that another one rules out is split
    into its parts, down to characters if need be."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._names = {name: f"r{i}" for i, name in enumerate(rules)}
        self._split: set[Node] = set()
        self._positions: dict[Node, Positions | None] = {}
        self._extensions: dict[tuple[Node, Node], Ranges] = {}
        self._work = 0
        while (wrong := self._too_large()) and self._work < MAX_WORK:
            self._split.add(wrong)

    def text(self) -> str:
        lines = [f"start: {self._names[ROOT]}"]
        lines += [f"{self._names[name]}: {self._write(node)}" for name, node in self._rules.items()]
        return "\n".join(lines)

    def parts(self, node: Node) -> list[Node]:
        """What a node that is not a term is made of: of a sequence, neighbours that are expressions are one part."""
        if not isinstance(node, Concat) or node in self._split or self._work >= MAX_WORK:
            return list(children(node))
        parts: list[Node] = []
        for together, group in groupby(node.parts, is_expression):
            run = list(group)
            parts += [sequence(run)] if together else run
        return parts

    def is_term(self, node: Node) -> bool:
        if self._work >= MAX_WORK:
            return isinstance(node, Chars) or node == EMPTY
        return node not in self._split and is_expression(node)

    def spend(self, work: int) -> bool:
        """Count steps. Returns whether there may be more."""
        self._work += work
        return self._work < MAX_WORK

    def _too_large(self) -> Node | None:
        """A term that is too large to be checked, or in which another one of these terms could go on where it should
        end."""
        terms = {term: self._of(term) for node in self._rules.values() for term in self._terms(node)}
        follow = _Follow(self._rules, self)
        for term, positions in terms.items():
            if positions is None or (len(terms) > MAX_TERMS and not isinstance(term, Chars)):
                return term
            after = follow.after(term)
            for other, longer in terms.items():
                if not self.spend(4 + len(after)):
                    return None
                if longer is not None and overlap(self._extension(term, other), after):
                    return other
        return None

    def _extension(self, term: Node, other: Node) -> Ranges:
        if (term, other) not in self._extensions:
            one, longer = self._of(term), self._of(other)
            assert one is not None and longer is not None
            self._extensions[term, other], steps = one.extended_by(longer)
            self.spend(4 * steps * (1 + max(map(len, longer.ranges), default=0)))
        return self._extensions[term, other]

    def _terms(self, node: Node) -> Iterator[Node]:
        pending = [node]
        while pending:
            node = pending.pop()
            if self.is_term(node):
                yield node
            else:
                pending += self.parts(node)

    def _of(self, term: Node) -> Positions | None:
        if term not in self._positions:
            self._positions[term] = found = Positions.of(term)
            self.spend(MAX_POSITIONS if found is None else len(found.ranges) ** 2)
        return self._positions[term]

    def _write(self, node: Node) -> str:
        if self.is_term(node):
            positions = self._of(node)
            if node == EMPTY:
                return '""'
            return f"/{pattern(node)}/" + ("?" if positions is not None and positions.nullable else "")
        if isinstance(node, Rule):
            return self._names[node.name]
        parts = [f"({self._write(part)})" for part in self.parts(node)]
        if isinstance(node, Repeat):
            return parts[0] + _count(node)
        return (" | " if isinstance(node, Either) else " ").join(parts)


def _count(node: Repeat) -> str:
    if node.most is None:
        return "*" if node.least == 0 else "+" if node.least == 1 else f"{{{node.least},}}"
    return f"{{{node.least},{node.most}}}"


def is_expression(node: Node) -> bool:
    return not any(isinstance(one, Rule) for one in _nodes(node))


@dataclass(slots=True)
class Positions:
    """The automaton of an expression that has a state per occurrence of a character class (Glushkov's)."""

    ranges: list[Ranges]
    first: frozenset[int]
    last: frozenset[int]
    next: list[frozenset[int]]
    nullable: bool

    @classmethod
    def of(cls, node: Node) -> Positions | None:
        """None if the expression is too large."""
        ranges: list[Ranges] = []
        following: list[set[int]] = []

        def build(node: Node) -> tuple[frozenset[int], frozenset[int], bool]:
            if len(ranges) > MAX_POSITIONS:
                raise OverflowError
            if isinstance(node, Chars):
                ranges.append(node.ranges)
                following.append(set())
                place = frozenset((len(ranges) - 1,))
                return place, place, False
            if isinstance(node, Concat):
                return chain(list(node.parts))
            if isinstance(node, Either):
                built = [build(option) for option in node.options]
                return (
                    frozenset().union(*(one[0] for one in built)),
                    frozenset().union(*(one[1] for one in built)),
                    any(one[2] for one in built),
                )
            assert isinstance(node, Repeat)
            if node.most is None:
                first, last, nullable = build(node.item)
                for end in last:
                    following[end] |= first
                repeated = (first, last, nullable or node.least == 0)
                # More than once over is the same for what may extend what, but not for what is complete.
                return repeated if node.least <= 1 else chain([node.item] * (node.least - 1), repeated)
            optional: Node = EMPTY
            for _ in range(node.most - node.least):
                optional = Either((Concat((node.item, optional)), EMPTY))
                if len(ranges) > MAX_POSITIONS or node.most > MAX_POSITIONS:
                    raise OverflowError
            return chain([node.item] * node.least + ([optional] if node.most > node.least else []))

        def chain(
            parts: list[Node], tail: tuple[frozenset[int], frozenset[int], bool] | None = None
        ) -> tuple[frozenset[int], frozenset[int], bool]:
            first: frozenset[int] = frozenset()
            last: frozenset[int] = frozenset()
            nullable = True
            for one in [*map(build, parts), *([tail] if tail else [])]:
                for place in last:
                    following[place] |= one[0]
                first = first | one[0] if nullable else first
                last = last | one[1] if one[2] else one[1]
                nullable = nullable and one[2]
            return first, last, nullable

        try:
            first, last, nullable = build(node)
        except (OverflowError, RecursionError):
            return None
        return cls(ranges, first, last, list(map(frozenset, following)), nullable)

    @property
    def opening(self) -> Ranges:
        """Characters that a match may begin with."""
        return union(*(self.ranges[place] for place in self.first))

    def extended_by(self, other: Positions) -> tuple[Ranges, int]:
        """Characters by which a complete match of this one can grow into the beginning of a match of the other, and the
        steps that it took to find them."""
        found: Ranges = ()
        pending = [(a, b) for a in self.first for b in other.first if overlap(self.ranges[a], other.ranges[b])]
        seen = set(pending)
        while pending:
            a, b = pending.pop()
            if a in self.last:
                found = union(found, *(other.ranges[place] for place in other.next[b]))
            for pair in ((x, y) for x in self.next[a] for y in other.next[b]):
                if pair not in seen and overlap(self.ranges[pair[0]], other.ranges[pair[1]]):
                    seen.add(pair)
                    pending.append(pair)
        return found, len(seen)


class _Follow:
    """Which characters may come after each term, by the usual fixed point over first characters of rules."""

    def __init__(self, rules: Mapping[str, Node], writer: _Writer) -> None:
        self._rules, self._writer = rules, writer
        self._first: dict[str, tuple[Ranges, bool]] = dict.fromkeys(rules, ((), False))
        self._after: dict[Node, Ranges] = {}
        while sum(self._grow(name) for name in rules):
            pass
        while sum(self._spread(node, self._after.get(Rule(name), ())) for name, node in rules.items()):
            pass

    def after(self, term: Node) -> Ranges:
        return self._after.get(term, ())

    def _grow(self, name: str) -> bool:
        if not self._writer.spend(4 + len(self._first[name][0])):
            return False
        now = self._opening(self._rules[name])
        changed = now != self._first[name]
        self._first[name] = now
        return changed

    def _opening(self, node: Node) -> tuple[Ranges, bool]:
        """First characters, and whether nothing at all matches too."""
        if isinstance(node, Rule):
            return self._first[node.name]
        if isinstance(node, Chars):
            return node.ranges, False
        if isinstance(node, Concat):
            ranges: Ranges = ()
            for part in node.parts:
                opening, nullable = self._opening(part)
                ranges = union(ranges, opening)
                if not nullable:
                    return ranges, False
            return ranges, True
        if isinstance(node, Either):
            each = [self._opening(option) for option in node.options]
            return union(*(one[0] for one in each)), any(one[1] for one in each)
        opening, nullable = self._opening(node.item)
        return opening, nullable or node.least == 0

    def _spread(self, node: Node, after: Ranges) -> bool:
        """Note what comes after the node's terms and rules if `after` comes after it. Returns whether that was news."""
        if isinstance(node, Rule) or self._writer.is_term(node):
            before = self._after.get(node, ())
            self._after[node] = union(before, after)
            return self._after[node] != before
        if isinstance(node, Repeat) and node.most != 1:
            after = union(after, self._opening(node)[0])
        changed = False
        for part in reversed(self._writer.parts(node)) if self._writer.spend(4 + len(after)) else ():
            changed |= self._spread(part, after)
            if isinstance(node, Concat):
                opening, nullable = self._opening(part)
                after = union(opening, after) if nullable else opening
        return changed
