"""A suffix automaton that counts: every substring of a growing text, how often it occurs, and what followed it.

A state is a class of substrings that end at the same places (Blumer et al. 1985, "The smallest automaton recognizing
the subwords of a text"): the suffixes of its longest string, down to one token more than the longest string of its
`link`, the state of the next shorter suffix. State 0 is the empty string. There are at most two states per token.
Appending a token takes amortised constant time, plus one addition for each state of the text's suffixes of up to
COUNTED tokens.
"""

from __future__ import annotations

from array import array

from stridelm.types import MAX_DRAFT_ROWS

LONGEST = MAX_DRAFT_ROWS
"""Longest match, in tokens."""
COUNTED = LONGEST + MAX_DRAFT_ROWS
"""Longest substrings that are counted: a match and the deepest draft after it. Up to this length counts are exact."""
END = -1
"""Separates two texts in one automaton. No request holds it, so no match extends across it."""


class Automaton:
    """`next[s]` holds the transitions of state s by token, in order of first occurrence; `count[s]` is how often the
    strings of s occur, for states that have any string of at most COUNTED tokens."""

    def __init__(self) -> None:
        self.size = 0
        """Tokens appended."""
        self.next: list[dict[int, int]] = [{}]
        self.length = array("i", [0])
        self.link = array("i", [-1])
        self.count = array("i", [0])
        self._last = 0
        """State of the whole text."""
        self._tail = 0
        """State of its last COUNTED tokens."""

    def append(self, token: int) -> None:
        follow, link = self.next, self.link
        self.size += 1
        new = self._state(self.size, {}, 0)
        at, self._last = self._last, new
        while at >= 0 and token not in follow[at]:
            follow[at][token] = new
            at = link[at]
        link[new] = 0 if at < 0 else self._target(at, token)
        self._tail = self.suffix(follow[self._tail][token], COUNTED)
        at = self._tail
        while at > 0:
            self.count[at] += 1
            at = link[at]

    def repeated(self) -> tuple[int, int]:
        """(state, length) of the longest suffix of the text that occurs earlier in it, up to LONGEST tokens."""
        state = self._tail if self.count[self._tail] > 1 else max(self.link[self._tail], 0)
        length = min(self.length[state], LONGEST)
        return self.suffix(state, length), length

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """For the string (state, length) followed by `token`: (state, length) of its longest suffix of up to LONGEST
        tokens that occurs here."""
        while state and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        if token not in self.next[state]:
            return 0, 0
        length = min(length + 1, LONGEST)
        return self.suffix(self.next[state][token], length), length

    def suffix(self, state: int, length: int) -> int:
        """The state of a state's suffix of `length` tokens; the state itself if its strings are no longer than that."""
        while self.length[self.link[state]] >= length > 0:
            state = self.link[state]
        return state

    def _target(self, at: int, token: int) -> int:
        """The state of the longest string of `at` followed by `token`. If it shares a state with longer strings, which
        from now on occur less often, it is split off."""
        follow, link, length = self.next, self.link, self.length
        old = follow[at][token]
        if length[old] == length[at] + 1:
            return old
        clone = self._state(length[at] + 1, dict(follow[old]), self.count[old])
        link[clone], link[old] = link[old], clone
        while at >= 0 and follow[at].get(token) == old:
            follow[at][token] = clone
            at = link[at]
        return clone

    def _state(self, length: int, follow: dict[int, int], count: int) -> int:
        self.next.append(follow)
        self.length.append(length)
        self.link.append(0)
        self.count.append(count)
        return len(self.next) - 1
