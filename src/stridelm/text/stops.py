"""Finds stop strings in text that arrives in pieces, and never releases a character that may belong to one.

Which stop string ends a request must not depend on how its text was cut into pieces: a step may emit one token or
eight. So the match is the stop string that is completed first, character by character, and among those completed at the
same character the first in the request's list, as in vLLM. Later text cannot change the match, and generation ends as
early as possible.

The search is an Aho-Corasick automaton: each character costs the same whether there is one stop string or ten thousand,
and the depth of the current state is exactly the amount of text to hold back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache

SHARED = 16
"""Automata kept in the cache: the samples of a prompt are added one after the other and share one."""


class Automaton:
    """The automaton of a list of stop strings. Never modified, so requests with the same list share it."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self.next: list[dict[str, int]] = [{}]
        """State -> character -> state. State 0 is the empty text, the others are prefixes of stop strings."""
        self.depth = [0]
        """State -> length of its prefix."""
        self.fail = [0]
        """State -> the state of the longest proper suffix of its prefix."""
        self.match: list[str | None] = [None]
        """State -> of the stop strings that end here, the first in the list."""
        for stop in stops:
            self._insert(stop)
        self._link({stop: place for place, stop in reversed(list(enumerate(stops)))})

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        """Add the states of `stop`'s prefixes."""
        state = 0
        for depth, character in enumerate(stop, 1):
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.depth.append(depth)
                self.fail.append(0)
                self.match.append(None)
            state = self.next[state][character]
        self.match[state] = stop

    def _link(self, place: Mapping[str, int]) -> None:
        """Fill `fail` and `match`, shorter prefixes first, because a suffix is a shorter prefix. place: stop string ->
        its index in the list."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self.next[state].items():
                suffix = self.fail[state]
                while suffix and character not in self.next[suffix]:
                    suffix = self.fail[suffix]
                self.fail[child] = self.next[suffix].get(character, 0)
                queue.append(child)
            ends = [stop for stop in (self.match[state], self.match[self.fail[state]]) if stop is not None]
            self.match[state] = min(ends, key=place.__getitem__, default=None)


_shared = lru_cache(SHARED)(Automaton)


class StopStrings:
    """The search for one request. `stops` are non-empty strings; `include` keeps the match in the text."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.include = include
        self.matched: str | None = None
        self.end: int | None = None
        """Characters of the whole text up to the end of the match, the match included."""
        self._automaton = _shared(tuple(stops))
        self._state = 0
        self._held = ""
        """The text held back: always the prefix that the state stands for."""
        self._read = 0
        """Characters read so far."""

    def push(self, new_text: str, armed: bool = True) -> tuple[str, str | None]:
        """Read `new_text`. Returns the text that is safe to emit now and the stop string matched, if any.

        After a match the rest of `new_text` is dropped and nothing more may be pushed. With `armed=False` a
        stop string that ends in `new_text` is ignored, because `min_tokens` has not been reached.
        """
        assert self.matched is None, "text was pushed after a stop string"
        automaton = self._automaton
        if not automaton.depth[-1]:
            self._read += len(new_text)
            return new_text, None
        for index, character in enumerate(new_text):
            self._state = automaton.step(self._state, character)
            match = automaton.match[self._state]
            if armed and match is not None:
                return self._finish(self._held + new_text[: index + 1], self._read + index + 1, match)
        self._read += len(new_text)
        text = self._held + new_text
        safe = len(text) - automaton.depth[self._state]
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The text held back, when no more will come. Empty after a match."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _finish(self, text: str, end: int, match: str) -> tuple[str, str]:
        self.matched, self.end, self._read, self._held = match, end, end, ""
        return text if self.include else text[: len(text) - len(match)], match
