"""Finds which bytes each token adds to a text, and at which character they begin.

The bytes of all tokens joined are the text's. Characters and tokens need not have common borders, so a token's bytes
may be parts of characters, and a stop string may cut them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stridelm.text.detokenize import WINDOW
from stridelm.text.tokenizer import Tokenizer


class Span(NamedTuple):
    """A token's part of a text."""

    begin: int
    """Characters before it. A token that begins within a character has that character's place."""
    data: bytes
    """Empty for a token that is left out of the text."""


@dataclass(slots=True)
class PlacedToken:
    """A token's span while the text may still be cut."""

    span: Span
    places: Sequence[int]
    """For each of its bytes, the index of the character that the byte belongs to."""

    @property
    def end(self) -> int:
        """Characters up to and including its last."""
        return self.places[-1] + 1 if self.places else self.span.begin

    def cut(self, length: int) -> Span:
        """Its span in the text cut to `length` characters."""
        if self.end <= length:
            return self.span
        kept = sum(place < length for place in self.places)
        return Span(min(self.span.begin, length), self.span.data[:kept])


class TokenPlacer:
    """Places the tokens of one output, in order. The text is the one that Detokenizer makes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """kept: special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.skipped_ids(skip_special_tokens, kept)
        self._begun = False
        """Whether any text came before."""
        self._next = 0
        """Index of the character to which `_pending` belongs, or of the next one."""
        self._pending = b""
        """Bytes of a character that is not complete."""
        self._prompt_bytes = 0
        """How many of them belong to the prompt."""
        for token in self._last_with_text(prompt_ids):
            self.place(token)
        self._next, self._prompt_bytes = 0, len(self._pending)

    def place(self, token: int, silent: bool = False) -> PlacedToken:
        """The next token's place. silent: it is left out of the text."""
        data = b"" if silent or token in self._skipped else self._bytes(token)
        begin = self._next
        if data.isascii() and not self._pending:
            self._next += len(data)
            places: Sequence[int] = range(begin, self._next)
        else:
            places = [self._place(byte) for byte in data]
        return PlacedToken(Span(places[0] if places else begin, data), places)

    def _last_with_text(self, ids: Sequence[int]) -> list[int]:
        """The last few tokens that have text: enough to see whether they end within a character."""
        found: list[int] = []
        for token in reversed(ids):
            if token not in self._skipped and self._tokenizer.knows(token):
                found.append(token)
                if len(found) == WINDOW:
                    break
        return found[::-1]

    def _bytes(self, token: int) -> bytes:
        if self._begun:
            return self._tokenizer.token_bytes(token)
        self._begun = self._tokenizer.knows(token)
        return self._tokenizer.opening_bytes(token)

    def _place(self, byte: int) -> int:
        """The index of the character that the next byte belongs to."""
        grown = self._pending + bytes((byte,))
        missing = _missing(grown)
        if missing is None and self._pending:  # it does not continue the character that the bytes before it began
            self._next += self._spoiled()
            self._prompt_bytes, grown = 0, bytes((byte,))
            missing = _missing(grown)
        place = self._next
        if missing:
            self._pending = grown
        else:
            self._next += 1
            self._pending, self._prompt_bytes = b"", 0
        return place

    def _spoiled(self) -> int:
        """U+FFFDs that the output has in place of the pending bytes: byte tokens get one each, and a byte-level decoder
        makes one of them together, which is the prompt's if it began there."""
        if self._tokenizer.byte_values:
            return len(self._pending) - self._prompt_bytes
        return int(not self._prompt_bytes)


def _missing(data: bytes) -> bool | None:
    """Whether a character that begins with `data` has more bytes; None if there is no such character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return True if error.reason == "unexpected end of data" else None
    return False
