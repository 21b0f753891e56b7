"""Which tokens a grammar allows, by brute force: a token is allowed if the text with it can still become a match.

Patterns are matched by the `regex` package (transformers needs it), which tells whether a text is the beginning of a
match, and listed texts by comparing bytes. Patterns have ASCII alone, so that a text is never cut within a character.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import regex

from fuzz.endings import Alphabet

Grammar = Mapping[str, Any]
"""`regex`, `choice`, or `json` with an `enum`, as in structured_outputs."""


def allowed(grammar: Grammar, alphabet: Alphabet, output: Sequence[int], count: int) -> np.ndarray:
    """[count] bool: the tokens that may come after this output. Special tokens have no text, and the end of text may
    only come after a whole match."""
    begins, matches = _tests(json.dumps(dict(grammar), sort_keys=True))
    if alphabet.eos_id in output:
        return np.ones(count, dtype=bool)  # a lossy rule may go on after the end, and nobody sees it
    before = alphabet.bytes_of(output, skip_special=True)
    tokens = [alphabet.bytes_of([token], skip_special=True) for token in range(count)]
    mask = np.array([bool(text) and begins(before + text) for text in tokens])
    if alphabet.eos_id is not None:
        mask[alphabet.eos_id] = matches(before)
    return mask if mask.any() else ~mask  # the output is a draft that is no match: nothing is drawn after it


@lru_cache
def _tests(grammar: str) -> tuple[Callable[[bytes], bool], Callable[[bytes], bool]]:
    """Whether a text may be the beginning of a match, and whether it is one."""
    asked = json.loads(grammar)
    if "regex" in asked:
        pattern = regex.compile(asked["regex"].encode(), regex.ASCII)
        return (
            lambda text: pattern.fullmatch(text, partial=True) is not None,
            lambda text: pattern.fullmatch(text) is not None,
        )
    listed = asked["choice"] if "choice" in asked else [json.dumps(value) for value in asked["json"]["enum"]]
    texts = [text.encode() for text in listed]
    return lambda text: any(each.startswith(text) for each in texts), lambda text: text in texts
