"""Turns a stream of tokens into a stream of text that never shows half a character.

Tokens are pieces of bytes and a character may need several of them; and what a token adds depends on what
stands before it (a decoder strips the space at the start of a text, joins byte tokens, glues sub-words). So a
token is decoded behind a short window of its predecessors, and what the window did not have before is new:

    ... w w w w w t          decode(w + t) minus what decode(w) has given already
        `window` `new`       a U+FFFD at the very end may still become a character: it waits

The window is cut back when it grows long, so a token costs the same wherever it stands. Ids that the tokenizer does not
know (most models have more rows than their tokenizer has tokens) have no text and never enter it.

Vocabularies with byte fallback need more. Their decoder reads a whole run of byte tokens at once and, if any
of it is invalid, replaces all of it, characters long since shown included. Here such bytes are gathered
apart, and each character is final when it is complete.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from stridelm.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
WINDOW = 8
"""Tokens of context that a cut leaves: any decoder's look-behind and the longest character's bytes fit in."""
LONGEST_WINDOW = 24


class Detokenizer:
    """The text of one output.

    It is decode(prompt + output) without decode(prompt), in whatever pieces the tokens come. A character that
    the prompt began and the output completes is the output's. Byte tokens that spell no character are one
    U+FFFD each.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._byte_values = tokenizer.byte_values
        self._window: list[int] = []
        self._limit = LONGEST_WINDOW
        self._began = 0
        """Place in the window of the token that began what waits; its length if nothing does."""
        self._text = ""
        """Text of the window."""
        self._done = 0
        """Characters of the window's text that were given out, or are the prompt's."""
        self._open = False
        """The prompt's text ends with a U+FFFD that the output may still turn into a character."""
        self._bytes = bytearray()
        """Byte tokens that are no whole character yet."""
        self._prompt_bytes = 0
        """How many of them are the prompt's."""
        self._length = 0
        self._ends: list[int] = []
        """Output token -> length of the output's text once it is there."""
        self._start(prompt_ids)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next output tokens. Returns the text that is newly complete."""
        pieces = []
        for token in ids:
            piece = self._take(token) if self._has_text(token) else ""
            self._length += len(piece)
            self._ends.append(self._length)
            pieces.append(piece)
        return "".join(pieces)

    def flush(self) -> str:
        """The text of bytes that waited for more, when no more will come. It counts as the last token's."""
        piece = self._spoil_bytes() + self._text[self._done :]
        self._done, self._open = len(self._text), False
        self._length += len(piece)
        if self._ends:
            self._ends[-1] = self._length
        return piece

    def tokens_to(self, offset: int) -> int:
        """How many output tokens it takes to have the first `offset` characters of the output's text."""
        assert offset <= self._length, f"only {self._length} characters are there, not {offset}"
        return bisect_left(self._ends, offset) + 1 if offset > 0 else 0

    def _start(self, prompt_ids: Sequence[int]) -> None:
        """Open the window over the prompt's last tokens; keep the bytes of a character it did not end."""
        for token in reversed(prompt_ids):
            if self._has_text(token):
                self._window.append(token)
                if len(self._window) == WINDOW:
                    break
        self._window.reverse()
        self._text = self._decode(self._window)
        self._done = len(self._text)
        if not self._byte_values:
            self._open = self._text.endswith(REPLACEMENT)
        self._began = 0 if self._open else len(self._window)
        for token in self._window:
            if token in self._byte_values:
                self._take_byte(self._byte_values[token])
            else:
                self._bytes.clear()
        self._prompt_bytes = len(self._bytes)

    def _take(self, token: int) -> str:
        """The text that `token` completes."""
        byte = self._byte_values.get(token)
        # An ASCII byte that opens a text goes the common way, for the decoder to strip it if it is a space.
        if byte is None or (byte < 0x80 and not self._window):
            return self._spoil_bytes() + self._take_token(token)
        # What follows a run of bytes needs to know no more than that it does not open the text.
        self._window, self._began = [token], 1
        self._text = self._decode(self._window)
        self._done = len(self._text)
        return self._take_byte(byte)

    def _take_token(self, token: int) -> str:
        pending = self._open or self._done < len(self._text)
        self._window.append(token)
        self._text = text = self._decode(self._window)
        # At most one U+FFFD waits: a decoder of bytes makes one of all the bytes of an unfinished character.
        waits = not self._byte_values and text.endswith(REPLACEMENT)
        settled = len(text) - waits
        if self._open and settled >= self._done:
            self._done -= text[self._done - 1] != REPLACEMENT
            self._open = False
        piece = text[self._done : settled]
        self._done = max(self._done, settled)
        if not waits:
            self._began = len(self._window)
        elif piece or not pending:  # what waited before is settled: this is another
            self._began = len(self._window) - 1
        if len(self._window) > self._limit:
            self._cut_window()
        return piece

    def _cut_window(self) -> None:
        """Cut the window back to the tokens before what waits. That may be long ago: tokens of a vocabulary may have no
        text where they stand."""
        waiting = len(self._text) - self._done
        start = max(0, self._began - WINDOW)
        self._window, self._began = self._window[start:], self._began - start
        self._text = self._decode(self._window)
        self._done = len(self._text) - waiting
        assert self._done >= 0, "the text that waits was cut off"
        self._limit = max(LONGEST_WINDOW, 2 * len(self._window))

    def _has_text(self, token: int) -> bool:
        return token not in self._skipped and self._tokenizer.knows(token)

    def _take_byte(self, byte: int) -> str:
        """The characters that `byte` completes or spoils."""
        self._bytes.append(byte)
        try:
            piece = self._bytes.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            if len(self._bytes) == 1:
                return self._spoil_bytes()
            # The bytes before this one began a character that it does not go on with. It may open one.
            self._bytes.pop()
            return self._spoil_bytes() + self._take_byte(byte)
        self._bytes.clear()
        self._prompt_bytes = 0
        return piece

    def _spoil_bytes(self) -> str:
        """Give up the bytes that wait for more: one U+FFFD each, but for those that are the prompt's."""
        count = len(self._bytes) - self._prompt_bytes
        self._bytes.clear()
        self._prompt_bytes = 0
        return REPLACEMENT * count

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)
