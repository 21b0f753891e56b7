"""The most bytes of text that one token can represent, so that a text can be refused as too long before it is
tokenised.

Known only for tokenizers in which every byte of a text becomes part of some token: BPE over bytes, or with byte
fallback. Others may drop white space, turn any word into a single unknown token, or let a special token absorb the
space next to it; for them there is no such number, and a text must be tokenised to be measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from stridelm.text.tokenizer import Tokenizer

KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split"}
"""Pre-tokenizers that drop nothing, unless a Split is configured to."""
SHRINKING = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 4, "Prepend": 1, "ByteLevel": 1}
"""Normalizer -> an upper bound on the factor by which it shrinks a text's bytes. NFC composes at most eleven bytes into
four (U+1F82 and the like); compatibility forms turn the four bytes of a mathematical letter into one."""


def longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """The bound in bytes; None where none is known."""
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
    """Whether it replaces a text by one that is at least as long."""
    if step["type"] != "Replace":
        return False
    replaced = step["pattern"].get("String")
    return replaced is not None and len(step["content"].encode()) >= len(replaced.encode())
