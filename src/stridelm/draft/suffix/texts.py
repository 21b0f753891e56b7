"""The texts in which continuations are looked up: a request's own tokens, and outputs of earlier requests with the same
cache salt."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from stridelm.draft.suffix.automaton import END, LONGEST, Automaton
from stridelm.types import Request

OWN = 2**14
"""At least this many of a request's latest tokens are searched, and fewer than twice as many. A token takes about 400
bytes."""
CORPUS = 2**18
"""Most tokens kept of earlier requests, over all salts: about 100 MB."""
GENERATIONS = 4
"""Parts of the corpus, each an automaton of its own; the oldest is dropped first."""
BORDER = 8
"""Prompt tokens that are stored before an output in the corpus, so that its beginning can be matched too."""

Match = tuple[int, int]
"""(state, length) of the longest suffix of a request that occurs in an automaton."""
Place = tuple[Automaton, int]
"""A state of an automaton."""


class Corpus:
    """Outputs of earlier requests, in automata from old to new. Each counts only its own texts, so dropping one drops
    its counts."""

    def __init__(self, most: int = CORPUS) -> None:
        self.share = most // GENERATIONS
        self.automata: deque[Automaton] = deque(maxlen=GENERATIONS)
        self.version = 0
        """Counts changes. A match holds for one version only: a new text may contain a longer match."""

    def add(self, text: Sequence[int]) -> None:
        """Add a text, or its end if it is longer than a generation."""
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
    """One corpus per salt. When they exceed CORPUS in total, the least recently used salt is dropped first."""

    def __init__(self) -> None:
        self._by_salt: dict[str | None, Corpus] = {}
        """In order of use."""

    def of(self, request: Request) -> Corpus:
        """The corpus that the request may draft from."""
        return self._by_salt.get(request.params.cache_salt) or NOBODYS

    def add(self, request: Request, text: Sequence[int]) -> None:
        """Add a request's text to the corpus of its salt."""
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
"""A corpus that is always empty."""


@dataclass(slots=True)
class Text:
    """A request's tokens that have been read so far, and the matches of their end in the corpus."""

    own: Automaton = field(default_factory=Automaton)
    read: int = 0
    matches: list[Match] = field(default_factory=list)
    """One for each automaton of `seen` at `version`."""
    seen: Corpus | None = None
    version: int = -1

    def catch_up(self, request: Request, corpus: Corpus) -> None:
        """Read the tokens that became known since the last call."""
        fresh = tokens_from(request, self.read)
        self.read = request.known
        if self.own.size + len(fresh) >= 2 * OWN:
            self.own, fresh = Automaton(), tokens_from(request, self.read - OWN)
        for token in fresh:
            self.own.append(token)
        if self.seen is not corpus or self.version != corpus.version or len(fresh) >= LONGEST:
            self.seen, self.version, self.matches = corpus, corpus.version, [(0, 0)] * len(corpus.automata)
            fresh = tokens_from(request, self.read - LONGEST)  # a match cannot begin earlier
        for i, automaton in enumerate(corpus.automata):
            for token in fresh:
                self.matches[i] = automaton.follow(*self.matches[i], token)

    def longest(self, corpus: Corpus) -> tuple[list[Place], int]:
        """The places in the corpus where the longest suffix of the text occurs, and its length."""
        length = max((length for _, length in self.matches), default=0)
        found = zip(corpus.automata, self.matches, strict=True)
        return [(automaton, state) for automaton, (state, own) in found if own == length], length


def tokens_from(request: Request, start: int) -> list[int]:
    """The request's tokens from index `start` on, without copying those before."""
    prompt, output = request.prompt_ids, request.output_ids
    start = max(start, 0)
    return prompt[start:] + output[max(start - len(prompt), 0) :]
