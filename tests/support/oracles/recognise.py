"""Which texts rules match, by the definition: sets of places where a match can end, grown until they stay the same."""

from __future__ import annotations

from collections.abc import Mapping

from stridelm.grammar.expressions import Chars, Concat, Either, Node, Repeat, Rule


def matches(node: Node, text: str, rules: Mapping[str, Node] | None = None) -> bool:
    return len(text) in Recogniser(text, rules or {}).ends(node, 0)


class Recogniser:
    def __init__(self, text: str, rules: Mapping[str, Node]) -> None:
        self._text, self._rules = text, rules
        self._known: dict[tuple[str, int], frozenset[int]] = {
            (name, place): frozenset() for name in rules for place in range(len(text) + 1)
        }
        while True:
            grown = {key: self.ends(rules[key[0]], key[1]) for key in self._known}
            if grown == self._known:
                break
            self._known = grown

    def ends(self, node: Node, place: int) -> frozenset[int]:
        if isinstance(node, Chars):
            code = ord(self._text[place]) if place < len(self._text) else -1
            return frozenset((place + 1,)) if any(a <= code <= b for a, b in node.ranges) else frozenset()
        if isinstance(node, Rule):
            return self._known[node.name, place]
        if isinstance(node, Concat):
            places = frozenset((place,))
            for part in node.parts:
                places = self._after(part, places)
            return places
        if isinstance(node, Either):
            return frozenset().union(*(self.ends(option, place) for option in node.options))
        assert isinstance(node, Repeat)
        places = frozenset((place,))
        for _ in range(node.least):
            places = self._after(node.item, places)
        found, count = places, node.least
        while places and (node.most is None or count < node.most):
            places = self._after(node.item, places) - found
            found, count = found | places, count + 1
        return found

    def _after(self, node: Node, places: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(self.ends(node, place) for place in places))
