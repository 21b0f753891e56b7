"""What continuations are looked up in: a request's own tokens, and what earlier requests of the same salt said."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from stridelm.draft.suffix.automaton import END, LONGEST, Automaton
from stridelm.types import Request

OWN = 2**14
"""A request is looked up in at least so many of its latest tokens, and in fewer than twice as many. A token takes about
400 bytes."""
CORPUS = 2**18
"""Most tokens kept of earlier requests, whatever their salts: about 100 MB."""
GENERATIONS = 4
"""The corpus is forgotten by so many parts, the oldest first, each an automaton of its own."""
BORDER = 8
"""Tokens of the prompt that stand before an output in the corpus, so that its beginning is found too."""

Match = tuple[int, int]
"""(state, length) of the longest suffix of a request that occurs in an automaton."""
Place = tuple[Automaton, int]
"""A state of an automaton: what occurs there, and what follows it."""


class Corpus:
    """What earlier requests said, in automata from old to new. Every one of them counts only its own texts, so that
    one that is dropped takes its counts along."""

    def __init__(self, most: int = CORPUS) -> None:
        self.share = most // GENERATIONS
        self.automata: deque[Automaton] = deque(maxlen=GENERATIONS)
        self.version = 0
        """Counts the changes. A match is of one version: a new text may hold a longer one."""

    def add(self, text: Sequence[int]) -> None:
        """Take in a text, or its end if it is longer than a generation."""
        text = [*text[1 - self.share :], END]
        if not self.automata or self.automata[-1].size + len(text) > self.share:
            self.automata.append(Automaton())
        for token in text:
            self.automata[-1].append(token)
        self.version += 1

    @property
    def size(self) -> int:
        """Tokens in all."""
        return sum(automaton.size for automaton in self.automata)

    def clear(self) -> None:
        """Forget all texts."""
        self.automata.clear()
        self.version += 1


class Corpora:
    """A corpus for each salt. What is over CORPUS in all goes, beginning with the salt that nobody has used longest."""

    def __init__(self) -> None:
        self._by_salt: dict[str | None, Corpus] = {}
        """In order of use."""

    def of(self, request: Request) -> Corpus:
        """What the request may be shown."""
        return self._by_salt.get(request.params.cache_salt) or NOBODYS

    def add(self, request: Request, text: Sequence[int]) -> None:
        """Take in what a request said."""
        salt = request.params.cache_salt
        self._by_salt[salt] = corpus = self._by_salt.pop(salt, None) or Corpus()
        corpus.add(text)
        while len(self._by_salt) > 1 and sum(one.size for one in self._by_salt.values()) > CORPUS:
            self._by_salt.pop(next(iter(self._by_salt))).clear()

    def clear(self) -> None:
        """Forget all texts."""
        for corpus in self._by_salt.values():
            corpus.clear()
        self._by_salt.clear()


NOBODYS = Corpus()
"""A corpus that stays empty."""


@dataclass(slots=True)
class Text:
    """A request's tokens as far as they were read, and where their end matches the corpus."""

    own: Automaton = field(default_factory=Automaton)
    read: int = 0
    matches: list[Match] = field(default_factory=list)
    """For each automaton of `seen` at `version`."""
    seen: Corpus | None = None
    version: int = -1

    def catch_up(self, request: Request, corpus: Corpus) -> None:
        """Read the tokens that have become known since the last time."""
        fresh = tokens_from(request, self.read)
        self.read = request.known
        if self.own.size + len(fresh) >= 2 * OWN:
            self.own, fresh = Automaton(), tokens_from(request, self.read - OWN)
        for token in fresh:
            self.own.append(token)
        if self.seen is not corpus or self.version != corpus.version or len(fresh) >= LONGEST:
            self.seen, self.version, self.matches = corpus, corpus.version, [(0, 0)] * len(corpus.automata)
            fresh = tokens_from(request, self.read - LONGEST)  # no match begins earlier
        for i, automaton in enumerate(corpus.automata):
            for token in fresh:
                self.matches[i] = automaton.follow(*self.matches[i], token)

    def longest(self, corpus: Corpus) -> tuple[list[Place], int]:
        """The places in the corpus where the longest suffix of the text occurs, and its length."""
        length = max((length for _, length in self.matches), default=0)
        found = zip(corpus.automata, self.matches, strict=True)
        return [(automaton, state) for automaton, (state, own) in found if own == length], length


def tokens_from(request: Request, start: int) -> list[int]:
    """The request's tokens from an index on, without a copy of those before."""
    prompt, output = request.prompt_ids, request.output_ids
    start = max(start, 0)
    return prompt[start:] + output[max(start - len(prompt), 0) :]
