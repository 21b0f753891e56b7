"""Grammars over a vocabulary of the 256 bytes, in which every text is one list of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import product
from random import Random
from typing import Any, ClassVar

import numpy as np

from stridelm.grammar.compiler import Grammars
from stridelm.params import StructuredOutputs

END = 256
CLOSING = b'"}],:'
SPACE = frozenset(b" \t\r\n")


class ByteTokenizer:
    """As much of a Tokenizer as grammars use. Tokens from 257 on are special."""

    special_ids = frozenset((257, 258))
    _names: ClassVar = {257: "<call>", 258: "</call>"}

    def knows(self, token: int) -> bool:
        return token < 259

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.token_text(token).encode()

    def token_text(self, token: int) -> str:
        return self._names.get(token, chr(token))


class WordTokenizer(ByteTokenizer):
    """One with all words of two and three letters, too: masks look at as many tokens as those of real vocabularies."""

    words: ClassVar = [
        bytes(word) for length in (2, 3) for word in product(b" abcdefghijklmnopqrstuvwxyz", repeat=length)
    ]

    def knows(self, token: int) -> bool:
        return token < 259 + len(self.words)

    def token_bytes(self, token: int) -> bytes:
        return self.words[token - 259] if token >= 259 else super().token_bytes(token)


@cache
def grammars(words: bool = False) -> Grammars:
    tokenizer = WordTokenizer() if words else ByteTokenizer()
    return Grammars(tokenizer, 259 + words * len(WordTokenizer.words), [END])  # type: ignore[arg-type]


def matcher(asked: dict[str, Any]) -> Any:
    """Raises ValueError if the grammar is refused."""
    return grammars().compile(StructuredOutputs.of(asked)).matcher.deep_copy()


def written(grammar: str) -> Any:
    """A matcher of a grammar in llguidance's syntax. Raises ValueError if llguidance refuses it."""
    return grammars().compiled(grammar, "grammar").matcher


def admits(start: Any, text: str | bytes | list[int]) -> bool:
    """Whether a text may be a whole output."""
    tokens = list(text.encode() if isinstance(text, str) else text)
    one = start.deep_copy()
    return one.try_consume_tokens(tokens) == len(tokens) and bool(one.is_accepting())


def random_output(start: Any, draw: Random, longest: int = 150, prefer: Iterable[int] = CLOSING) -> bytes | None:
    """A finished output whose tokens are drawn at random, more of those that end something; None if it is too long.
    Fails if no token is allowed."""
    one, output, closing = start.deep_copy(), bytearray(), {END, *prefer}
    for _ in range(longest):
        mask = np.frombuffer(one.compute_bitmask(), dtype=np.uint8)
        tokens = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert tokens and not one.is_error(), f"nothing may follow {bytes(output)!r}"
        rare = [token for token in tokens if token in closing]
        token = draw.choice(rare if rare and draw.random() < 0.4 else tokens)
        if token in SPACE and draw.random() < 0.9:
            token = draw.choice(tokens)
        if token == END:
            return bytes(output)
        assert one.consume_token(token)
        output.append(token)
    return None
