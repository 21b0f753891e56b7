"""EBNF admits what its rules say, however it is cut into lexemes."""

from __future__ import annotations

import itertools
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from fuzz.regexes import random_grammar
from stridelm.grammar import lexemes
from stridelm.grammar.ebnf import ROOT, read_ebnf
from stridelm.grammar.lexemes import lark
from support.checks.grammar_bytes import admits, matcher, random_output, written
from support.oracles.recognise import matches

WORDS = ["".join(word) for length in range(6) for word in itertools.product("abc", repeat=length)]


@pytest.mark.parametrize("part", range(4))
def test_random_grammars(part: int) -> None:
    """Every text is admitted just if the rules match it, and random outputs match."""
    for seed in range(25 * part, 25 * (part + 1)):
        draw = Random(seed)
        grammar = random_grammar(draw)
        rules = read_ebnf(grammar)
        start = None
        with suppress(ValueError):  # nothing can match it
            start = matcher({"grammar": grammar})
        if start is None:
            assert not any(matches(rules[ROOT], word, rules) for word in WORDS), (seed, grammar)
            continue
        for word in draw.sample(WORDS, 40):
            assert admits(start, word) == matches(rules[ROOT], word, rules), (seed, grammar, word)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= [a-z]+ "x"', ["ax", "xx", "axbx"], ["x", "ab"]),
        ('root ::= "if" name | name\nname ::= [a-z]+', ["if", "ifx", "x"], ["", "1"]),
        ('root ::= "\\"" [^"\\n]* "\\"" # text', ['"é👍"'], ['"', '"\n"']),
        ("root ::= [\\x41-\\u0043\\]\\-] | .", ["A", "]", "-", "👍", "\n"], ["", "AB"]),
        ('root ::=\n  "a"{2,3}\n  ("b" | "") more-1\nmore-1 ::= "c"?', ["aa", "aaabc", "aab"], ["a", "aaaa"]),
        ('root ::= "(" root ")" | "x"', ["((x))"], ["((x)", ""]),
        ('root ::= root "a" | ""', ["", "aaa"], ["b"]),
        ('root ::= "a"{0} "b"', ["b"], ["ab"]),
        ('root ::= "\\x61\\u0062\\U0001f44d\\t\\\\"', ["ab👍\t\\"], ["ab"]),
    ],
)
def test_syntax(grammar: str, good: list[str], bad: list[str]) -> None:
    start = matcher({"grammar": grammar})
    assert [text for text in good if not admits(start, text)] == []
    assert [text for text in bad if admits(start, text)] == []


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("nope", "list of rules"),
        ('rule ::= "a"', 'no rule "root"'),
        ("root ::= name", "names name, which is not defined"),
        ('root ::= "a" (=b)', "look-ahead"),
        ('root ::= ("a"', "parenthesis"),
        ('root ::= "a")', "nothing that it belongs to"),
        ("root ::= *", "nothing that it belongs to"),
        ('root ::= "a\n', "line 1"),
        ('root ::= "a"\nroot ::= "b"', "each name once"),
        ('root ::= "a"{5,2}', "count of repeats"),
        ("root ::= [z-a]", "range"),
        ('root ::= "\\ud83d"', "not a character"),
        ('root ::= "\\q"', "escape"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        ("root ::= root", "nothing can match"),
        ('root ::= TagDispatch(("a", root))', "line 1"),
    ],
    ids=lambda value: value[:24],
)
def test_refusals(grammar: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        matcher({"grammar": grammar})


def test_rules_that_grow() -> None:
    """Rules that double forty times are refused, not written out."""
    grammar = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))
    with pytest.raises(ValueError, match="parts"):
        lark(read_ebnf(f'root ::= r0\n{grammar}\nr40 ::= "a"'))


def test_large_grammars_are_read_by_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for lexemes ends after so many steps, and what is written then still says the same."""
    monkeypatch.setattr(lexemes, "MAX_WORK", 5)
    for seed in range(25):
        draw = Random(seed)
        grammar = random_grammar(draw)
        rules = read_ebnf(grammar)
        with suppress(ValueError):  # nothing can match it
            start = written(lark(rules))
            for word in draw.sample(WORDS, 20):
                assert admits(start, word) == matches(rules[ROOT], word, rules), (seed, grammar, word)
    assert "[a-z]+" not in lark(read_ebnf('root ::= [a-z]+ "(" root ")" | [0-9]+ | ("if" | "else" [a-z]+) root'))


def test_chains_of_rules() -> None:
    """So many rules that lead to one another that the library would overflow its stack are refused."""
    rules = "\n".join(f'r{i} ::= "a" r{i + 1} | root | "x"' for i in range(450))
    with pytest.raises(ValueError, match="lead to one another"):
        matcher({"grammar": f'root ::= r0\n{rules}\nr450 ::= "b"'})
    rules = "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(2000))
    with pytest.raises(ValueError, match="more than 500 rules"):
        matcher({"grammar": f'root ::= r0\n{rules}\nr2000 ::= "b"'})


def test_usual_grammars_are_lexemes() -> None:
    """Names, numbers, strings and keywords of a usual grammar are lexemes as a whole: masks of single characters take a
    hundred times as long."""
    written = lark(read_ebnf('root ::= term ([-+] term)*\nterm ::= [0-9]+ | [a-z_] [a-z0-9_]* | "(" root ")" | "let"'))
    assert r"/[0-9]+/" in written and r"[\x{5F}a-z][0-9\x{5F}a-z]*" in written


def test_random_outputs_match() -> None:
    rules = read_ebnf('root ::= "(" root ")" | [ab]+ "b" | root "c"')
    start: Any = matcher({"grammar": 'root ::= "(" root ")" | [ab]+ "b" | root "c"'})
    found = [random_output(start, Random(seed), prefer=b")b") for seed in range(40)]
    texts = [text.decode() for text in found if text is not None]
    assert len(texts) > 20 and all(matches(rules[ROOT], text, rules) for text in texts)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" | "b" y "c"\ny ::= "d" y',
        'root ::= "a" ("b" y)? | "c" (y)* "d" | "e" (y | "f")\ny ::= root y',
        'root ::= "c" [abc] | ("c" | y | "a") "abc" y | root root\ny ::= root ([bc])? [ab] y "c"',
    ],
)
def test_no_output_ends_in_nothing(grammar: str) -> None:
    """Where a rule has no end, what leads to it is no beginning of an output: random ones always go on or end."""
    start, draw = matcher({"grammar": grammar}), Random(0)
    assert any(random_output(start, draw) for _ in range(40))
