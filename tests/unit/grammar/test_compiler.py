"""Grammars are compiled once, tried out beyond what is forced, and refused once they have broken."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from fuzz.regexes import random_regex
from stridelm.grammar.guide import TOO_SLOW
from stridelm.grammar.share import MaskShare
from stridelm.params import SamplingParams, Speculation, StructuredOutputs
from stridelm.types import Request
from support.checks.grammar_bytes import END, admits, grammars, matcher, random_output

AMBIGUOUS = "S\nS ::= S S S S S | S S S | S S | T T | [a-z ]\nT ::= S T S | S | T S"


def request(asked: dict[str, Any]) -> Request:
    return Request("r", [1], SamplingParams(structured_outputs=asked), Speculation())


@pytest.mark.parametrize("forced", [0, 1, 100, 400])
def test_trials_go_beyond_what_is_forced(forced: int) -> None:
    """A grammar that is too ambiguous to follow is found out, also after a long text that leaves no choice."""
    asked = StructuredOutputs(grammar=f'root ::= "{"Q" * forced}" {AMBIGUOUS}')
    with pytest.raises(ValueError, match=TOO_SLOW):
        grammars(words=True).try_out(asked)
    grammars(words=True).try_out(StructuredOutputs(grammar=f'root ::= "{"Q" * forced}" [a-z ]*'))


def test_a_grammar_that_broke_is_refused() -> None:
    """One request finds out, by a limit of work and not of time; from then on others are told when they come."""
    asked = {"grammar": f'root ::= "a" {AMBIGUOUS}'}
    first = request(asked)
    guide = grammars(words=True).guide(first, MaskShare())
    for token in b"a" + b"b" * 200:
        assert guide.mask(()) is not None or guide.broken
        first.output_ids.append(token)
        guide.catch_up()
    assert guide.broken == TOO_SLOW and guide.mask(()) is None and not guide.ended
    with pytest.raises(ValueError, match=TOO_SLOW):
        grammars(words=True).guide(request(asked), MaskShare())


@pytest.mark.parametrize("part", range(2))
def test_random_expressions(part: int) -> None:
    """What comes out under a regular expression is what Python's `re` matches whole."""
    import re

    finished = 0
    for seed in range(150 * part, 150 * (part + 1)):
        draw = Random(seed)
        expression = random_regex(draw)
        try:
            start = matcher({"regex": expression})
        except ValueError:
            continue
        for _ in range(3):
            output = random_output(start, draw, longest=60)
            if output is not None:
                finished += 1
                assert re.fullmatch(expression, output.decode()), (seed, expression, output)
    assert finished > 150


@pytest.mark.parametrize("words", [["👍", "👎"], ['"', "\\", "\n", "/"], ["a", "ab", "abc"], ["x" * 300, "\u2028"]])
def test_choices(words: list[str]) -> None:
    """Exactly the choices are admitted, whatever characters they are made of."""
    start = matcher({"choice": words})
    assert all(admits(start, word) for word in words)
    assert not any(
        admits(start, word) for word in ("b", *(word + "?" for word in words), *(f'"{word}"' for word in words))
    )


def test_many_choices() -> None:
    words = [f"choice {i} of many" for i in range(1024)]
    start = matcher({"choice": words})
    assert all(admits(start, word) for word in words) and not admits(start, "choice 1024 of many")


def test_masks_follow_drafts() -> None:
    """A mask after a path leaves no state behind; paths beyond an end, or that the grammar forbids, have none."""
    one = request({"regex": "ab?"})
    guide = grammars().guide(one, MaskShare())
    first = guide.mask(())
    for path in [97], [97, 98], [97, END], [97, END, 97], [98], [97, 99, 98]:
        mask, end = guide.mask(path), guide.mask(path)
        assert (mask is None) == (end is None) == (path not in ([97], [97, 98]))
    again = guide.mask(())
    assert first is not None and again is not None and first.equal(again)
    one.output_ids += [97, END]
    guide.catch_up()
    assert guide.ended and guide.read == 3 and guide.mask(()) is None
