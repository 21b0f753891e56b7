"""How many bytes of text one token can stand for at most, so that a text can be too long before it is tokenised.

Only for tokenizers in which every byte of a text comes out as part of some token: BPE over bytes, or with a token for
each byte that it does not know. Others may drop white space, make a single unknown token of any word, or let a special
token swallow the space beside it; of those nothing is said, and a text of theirs is tokenised to be measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from stridelm.text.tokenizer import Tokenizer

KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split"}
"""Pre-tokenizers that drop nothing, unless a Split is told to."""
SHRINKING = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 4, "Prepend": 1, "ByteLevel": 1}
"""Normalizers -> how many times fewer bytes they may leave. Four composed bytes come of eleven at most (U+1F82 and its
like); compatibility makes one byte of the four of a mathematical letter."""


def longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """None where no such number is known."""
    rust = getattr(tokenizer.hf, "backend_tokenizer", None)
    if rust is None:
        return None
    form = json.loads(rust.to_str())
    if any(token["lstrip"] or token["rstrip"] for token in form["added_tokens"]):
        return None
    model, pieces = form["model"], list(_parts(form["pre_tokenizer"], "pretokenizers"))
    over_bytes = any(piece["type"] == "ByteLevel" for piece in pieces) or model.get("byte_fallback", False)
    keeps = all(piece["type"] in KEEPING and piece.get("behavior") != "Removed" for piece in pieces)
    if model["type"] != "BPE" or not over_bytes or not keeps:
        return None
    shrinks = 1
    for step in _parts(form["normalizer"], "normalizers"):
        factor = 1 if _lengthens(step) else SHRINKING.get(step["type"])
        if factor is None:
            return None
        shrinks *= factor
    return shrinks * max(len(token.encode()) for token in tokenizer.hf.get_vocab())


def _parts(step: Mapping[str, Any] | None, inside: str) -> Iterator[Mapping[str, Any]]:
    if step is not None and step["type"] == "Sequence":
        for part in step[inside]:
            yield from _parts(part, inside)
    elif step is not None:
        yield step


def _lengthens(step: Mapping[str, Any]) -> bool:
    """Whether it replaces a text by one that is no shorter."""
    if step["type"] != "Replace":
        return False
    replaced = step["pattern"].get("String")
    return replaced is not None and len(step["content"].encode()) >= len(replaced.encode())
