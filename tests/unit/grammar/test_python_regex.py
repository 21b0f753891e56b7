"""A regular expression means what Python's `re` means by it, or is refused."""

from __future__ import annotations

import itertools
import re
from random import Random

import pytest

from fuzz.regexes import TEXTS, random_regex
from stridelm.grammar.python_regex import full_match, search
from support.oracles.recognise import matches

WORDS = ["".join(word) for length in range(4) for word in itertools.product(TEXTS, repeat=length)]
ECMA = re.ASCII  # classes are ASCII's there; the texts hold no character in which white space or `.` differ
TRIED = 60


@pytest.mark.parametrize("part", range(4))
def test_random_expressions(part: int) -> None:
    """Every text is matched by the tree just if `re` matches it, whole (`fullmatch`) and anywhere (`search`)."""
    accepted = 0
    for seed in range(TRIED * part, TRIED * (part + 1)):
        draw = Random(seed)
        expression = random_regex(draw)
        try:
            tree = full_match(expression)
        except ValueError:
            continue
        accepted += 1
        for word in draw.sample(WORDS, 60):
            assert matches(tree, word) == bool(re.fullmatch(expression, word)), (seed, expression, word)
    assert accepted > TRIED / 2


def test_random_searches() -> None:
    """What is found by `search` is found by `re.search` too, and the other way round where classes and `$` agree."""
    accepted = 0
    for seed in range(TRIED):
        draw = Random(seed)
        expression = random_regex(draw)
        try:
            tree = search(expression)
        except ValueError:
            continue
        accepted += 1
        for word in draw.sample(WORDS, 60):
            found = matches(tree, word)
            assert not found or re.search(expression, word), (seed, expression, word)
            if not re.search(r"[.$\\]|\[\^", expression):
                assert found == bool(re.search(expression, word)), (seed, expression, word)
    assert accepted > TRIED / 2


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("(", "not a regular expression"),
        ("a(?=b)", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "back reference"),
        (r"(a)?(?(1)b|c)", "conditional"),
        (r"\bword\b", "anchor or a word border"),
        ("a^b", "anchor"),
        ("a$b", "anchor"),
        ("(^a)*", "anchor"),
        ("(?m)^a$", "anchors under the flag m"),
        ("(?i)a", "flags i and L"),
        ("x(?i:a)", "flags i and L"),
        ("(" * 150 + ")" * 150, "nested"),
        ("(" * 20_000 + ")" * 20_000, "nested"),
        ("a{99999999999}", "not a regular expression"),
    ],
    ids=lambda value: value[:24],
)
def test_refusals(expression: str, problem: str) -> None:
    for read in full_match, search:
        with pytest.raises(ValueError, match=problem):
            read(expression)


@pytest.mark.parametrize("expression", ["[]a]", r"a\Z", r"\Aa", r"\a"])
def test_what_differs_between_languages(expression: str) -> None:
    """A schema's pattern that means one thing in Python and another in ECMAScript is refused; a regex is Python's."""
    assert full_match(expression)
    with pytest.raises(ValueError, match="ECMAScript"):
        search(expression)


@pytest.mark.parametrize(
    ("expression", "both", "one"), [(r"^\d$", "7", "٣"), (r"^\w$", "a", "é"), (r"^\s$", " ", "\x1c")]
)
def test_classes_of_both_languages(expression: str, both: str, one: str) -> None:
    """In a schema's pattern a class is what both languages mean by it, in a regex what Python means."""
    assert matches(search(expression), both) and not matches(search(expression), one)
    assert matches(full_match(expression), both) and matches(full_match(expression), one)
