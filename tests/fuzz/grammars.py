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


NOTHING_LEFT = "the grammar and the other parameters left no token"
"""Stop reason of an output that left its grammar."""


def allowed(grammar: Grammar, alphabet: Alphabet, output: Sequence[int], count: int) -> np.ndarray:
    """[count] bool: the tokens that may come after this output. Special tokens have no text, and the end of text may
    only come after a whole match."""
    begins, matches = _tests(json.dumps(dict(grammar), sort_keys=True))
    if alphabet.eos_id in output or left_at(grammar, alphabet, output) is not None:
        return np.ones(count, dtype=bool)  # a lossy rule may go on after the end, and nobody sees it
    before = alphabet.bytes_of(output, skip_special=True)
    tokens = [alphabet.bytes_of([token], skip_special=True) for token in range(count)]
    mask = np.array([bool(text) and begins(before + text) for text in tokens])
    if alphabet.eos_id is not None:
        mask[alphabet.eos_id] = matches(before)
    return mask if mask.any() else ~mask  # the output is a draft that is no match: nothing is drawn after it


def left_at(grammar: Grammar, alphabet: Alphabet, output: Sequence[int]) -> int | None:
    """The number of tokens with which an output leaves the grammar, as it may under a rule that makes tokens up; None
    if it does not."""
    begins, matches = _tests(json.dumps(dict(grammar), sort_keys=True))
    for count, token in enumerate(output, 1):
        if token == alphabet.eos_id and matches(alphabet.bytes_of(output[: count - 1], skip_special=True)):
            return None
        text = alphabet.bytes_of([token], skip_special=True)
        if not text or not begins(alphabet.bytes_of(output[:count], skip_special=True)):
            return count
    return None


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
