"""Turns a stream of tokens into a stream of text that never shows half a character.

Tokens are pieces of bytes and a character may need several of them. Also, what a token adds depends on the tokens
before it (a decoder strips the space at the start of a text, joins byte tokens, glues sub-words). So a token is decoded
after a short window of its predecessors, and the text that the window alone did not have is new:

    ... w w w w w t          decode(w + t) minus what decode(w) has already given
        `window` `new`       a U+FFFD at the very end may still become a character: it is held back

The window is cut back when it grows long, so the cost of a token does not depend on its position. Ids that the
tokenizer does not know (most models have more rows than their tokenizer has tokens) have no text and never enter it.

Vocabularies with byte fallback need more. Their decoder reads a whole run of byte tokens at once and, if any of it is
invalid, replaces all of it, including characters already shown. Here such bytes are collected separately, and each
character is final when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stridelm.text.tokenizer import REPLACEMENT, Tokenizer

WINDOW = 8
"""Tokens of context left by a cut: enough for any decoder's look-behind and for the bytes of the longest character."""
LONGEST_WINDOW = 24


class Detokenizer:
    """The text of one output.

    It is decode(prompt + output) without decode(prompt), however the tokens are grouped. A character that the prompt
    began and the output completes belongs to the output. Each byte token that is not part of a valid character becomes
    one U+FFFD.
    """

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
        self._skip = skip_special_tokens and not kept  # those that are skipped never enter the window
        self._byte_values = tokenizer.byte_values
        self._window: list[int] = []
        self._limit = LONGEST_WINDOW
        self._began = 0
        """Index in the window of the token that began the text held back; the window's length if there is none."""
        self._text = ""
        """Text of the window."""
        self._done = 0
        """Characters of the window's text that were returned already, or belong to the prompt."""
        self._open = False
        """The prompt's text ends with a U+FFFD that the output may still turn into a character."""
        self._bytes = bytearray()
        """Byte tokens that do not form a whole character yet."""
        self._prompt_bytes = 0
        """How many of them belong to the prompt."""
        self._start(prompt_ids)

    def push(self, ids: Iterable[int]) -> str:
        """Add the next output tokens. Returns the text that is newly complete."""
        return "".join([self._take(token) for token in ids if self._has_text(token)])

    def flush(self) -> str:
        """The text held back, when no more tokens will come. It counts as the last token's."""
        piece = self._spoil_bytes() + self._text[self._done :]
        self._done, self._open = len(self._text), False
        return piece

    def _start(self, prompt_ids: Sequence[int]) -> None:
        """Open the window over the prompt's last tokens; keep the bytes of a character left incomplete."""
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
        # An ASCII byte at the start of a text takes the normal path, so that the decoder can strip it if it is a space.
        if byte is None or (byte < 0x80 and not self._window):
            return self._spoil_bytes() + self._take_token(token)
        # For what follows a run of bytes, one token of context is enough: it only shows that the text has begun.
        self._window, self._began = [token], 1
        self._text = self._decode(self._window)
        self._done = len(self._text)
        return self._take_byte(byte)

    def _take_token(self, token: int) -> str:
        pending = self._open or self._done < len(self._text)
        self._window.append(token)
        self._text = text = self._decode(self._window)
        # At most one U+FFFD is held back: a byte-level decoder makes one of all the bytes of an unfinished character.
        waits = not self._byte_values and text.endswith(REPLACEMENT)
        settled = len(text) - waits
        if self._open and settled >= self._done:
            self._done -= text[self._done - 1] != REPLACEMENT
            self._open = False
        piece = text[self._done : settled]
        self._done = max(self._done, settled)
        if not waits:
            self._began = len(self._window)
        elif piece or not pending:  # the text held back before is final: this U+FFFD is a new one
            self._began = len(self._window) - 1
        if len(self._window) > self._limit:
            self._cut_window()
        return piece

    def _cut_window(self) -> None:
        """Cut the window back to the tokens just before the text held back. That text may have begun many tokens ago,
        since some tokens have no text in their context."""
        waiting = len(self._text) - self._done
        start = max(0, self._began - WINDOW)
        self._window, self._began = self._window[start:], self._began - start
        self._text = self._decode(self._window)
        self._done = len(self._text) - waiting
        assert self._done >= 0, "the text held back was cut off"
        self._limit = max(LONGEST_WINDOW, 2 * len(self._window))

    def _has_text(self, token: int) -> bool:
        return token not in self._skipped and self._tokenizer.knows(token)

    def _take_byte(self, byte: int) -> str:
        """The characters that `byte` completes or makes invalid."""
        self._bytes.append(byte)
        try:
            piece = self._bytes.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            if len(self._bytes) == 1:
                return self._spoil_bytes()
            # This byte does not continue the character that the bytes before it began. It may begin a new one.
            self._bytes.pop()
            return self._spoil_bytes() + self._take_byte(byte)
        self._bytes.clear()
        self._prompt_bytes = 0
        return piece

    def _spoil_bytes(self) -> str:
        """Give up on the incomplete bytes: one U+FFFD each, except for the prompt's."""
        if not self._bytes:
            return ""
        count = len(self._bytes) - self._prompt_bytes
        self._bytes.clear()
        self._prompt_bytes = 0
        return REPLACEMENT * count

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)
