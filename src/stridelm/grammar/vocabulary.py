"""The tokens of a model as llguidance takes them: the bytes of each, those that end a text, and special tokens.

Special tokens match no text: their own is never shown, so a grammar that took it for letters would promise what the
output does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stridelm.text.tokenizer import Tokenizer


class Vocabulary:
    """tokens: bytes of each id, and of one more that ends texts where the model has no such token."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> None:
        self.size = size
        self.eos_ids = [token for token in dict.fromkeys(eos_ids) if 0 <= token < size]
        self.special = {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids) if token < size}
        """Text of each special token -> its id."""
        self.tokens = [
            tokenizer.token_bytes(token) if token not in tokenizer.special_ids and tokenizer.knows(token) else b""
            for token in range(size)
        ]
        self.first_bytes = np.array([data[0] if data else -1 for data in (*self.tokens, b"")], dtype=np.int16)
        """First byte of each token, -1 for one without text. Made before trials are forked, which all read it."""

    def library(self) -> Any:
        """llguidance's own form of it."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self)), eos_token=self.eos_ids or [self.size])


class _Tokens:
    """What llguidance asks of a tokenizer. Nothing is ever tokenised: masks hold every token that may follow."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = [*vocabulary.special.values(), *vocabulary.eos_ids, vocabulary.size]
        self.special_token_ids = sorted(set(special))
        self.eos_token_id = (vocabulary.eos_ids or [vocabulary.size])[0]
        names = {token: b"special %d" % token for token in self.special_token_ids}
        self.tokens = [names.get(token, data) for token, data in enumerate((*vocabulary.tokens, b""))]

    def __call__(self, text: str | bytes) -> list[int]:
        return []
