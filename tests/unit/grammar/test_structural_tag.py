"""Structural tags admit what xgrammar's format says, with special tokens as tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.checks.grammar_bytes import END, admits, matcher

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
CALL, CALLED = 257, 258


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(given: Any) -> Any:
    return matcher({"structural_tag": json.dumps({"type": "structural_tag", "format": given})})


TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [tag("<f=a>", INTEGER, "</f>"), tag("<f=b>", {"type": "regex", "pattern": "[xy]+"}, "</f>")],
}
SEPARATED = {"type": "tags_with_separator", "separator": ",", "tags": TRIGGERED["tags"]}


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"type": "const_string", "value": 'a"/👍'}, ['a"/👍'], ["a", ""]),
        (tag("<n>", INTEGER, "</n>"), ["<n>-12</n>"], ["<n>x</n>", "<n>12"]),
        (tag("<n>", ANY, "</n>"), ["<n></n>", "<n>a<b</n>"], ["<n>a</n></n>", "<n>a"]),
        (tag("<n>", ANY, ["</n>", "</m>"]), ["<n>a</m>", "<n></n>"], ["<n>a</m></n>"]),
        (
            tag("<n>", {"type": "regex", "pattern": "[a-z/<>]+"}, "</n>"),
            ["<n>a</n>", "<n></n></n>"],
            ["<n></n>", "<n>a</n>0"],
        ),
        (
            tag("<n>", {"type": "grammar", "grammar": 'root ::= a a\na ::= "x" | "y"'}, "</n>"),
            ["<n>xy</n>"],
            ["<n>x</n>"],
        ),
        (
            {"type": "sequence", "elements": [ANY, {"type": "const_string", "value": "END"}]},
            ["END", "ENDEND"],
            ["", "EN"],
        ),
        (
            {"type": "or", "elements": [INTEGER, {"type": "const_string", "value": "none"}]},
            ["12", "none"],
            ["no", "12none"],
        ),
        ({"type": "optional", "content": tag("<n>", INTEGER, "</n>")}, ["", "<n>1</n>"], ["<n>1</n><n>1</n>"]),
        ({"type": "plus", "content": tag("<n>", INTEGER, "</n>")}, ["<n>1</n>", "<n>1</n><n>2</n>"], [""]),
        ({"type": "star", "content": {"type": "const_string", "value": "ab"}}, ["", "abab"], ["aba"]),
        (
            TRIGGERED,
            ["", "hi", "<f=a>1</f>", "hi < <f=b>x</f> yo", "<f=a>1</f><f=a>2</f>"],
            ["<f", "a <fx", "<f=a>x</f>"],
        ),
        ({**TRIGGERED, "at_least_one": True}, ["<f=a>1</f>", "<f=a>1</f> and"], ["", "hi", "hi <f=a>1</f>"]),
        ({**TRIGGERED, "stop_after_first": True}, ["", "hi", "hi <f=a>1</f>"], ["<f=a>1</f>yo"]),
        ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, ["<f=a>1</f>"], ["", "hi", "<f=a>1</f>yo"]),
        (SEPARATED, ["", "<f=a>1</f>", "<f=a>1</f>,<f=b>x</f>"], ["<f=a>1</f>,", ","]),
        ({**SEPARATED, "at_least_one": True}, ["<f=a>1</f>"], [""]),
        ({**SEPARATED, "stop_after_first": True}, ["", "<f=a>1</f>"], ["<f=a>1</f>,<f=b>x</f>"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_meaning(given: Any, good: list[str], bad: list[str]) -> None:
    start = of(given)
    assert [text for text in good if not admits(start, text)] == []
    assert [text for text in bad if admits(start, text)] == []


def test_first_form() -> None:
    """Structures after triggers, as xgrammar and vLLM had them first."""
    given = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f>"]}
    start = matcher({"structural_tag": json.dumps(given)})
    assert admits(start, "so <f>1</f>.") and not admits(start, "so <f>x</f>")


def test_special_tokens() -> None:
    """A marker that is a special token is that token, and not its letters; free text never holds one."""
    calls = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag("<call>f:", INTEGER, "</call>")]}
    start, body = of(calls), list(b"f:12")
    assert admits(start, [*b"hi ", CALL, *body, CALLED, *b" yo"])
    assert admits(start, [CALL, *body, CALLED, CALL, *body, CALLED])
    assert not admits(start, [CALL, *body, *b"</call>"]) and not admits(start, [CALL, *b"g", CALLED])
    assert admits(start, "a <call>f:x")  # letters are only text
    until = of(tag("a<call>", ANY, "</call>"))
    assert admits(until, [*b"a", CALL, *b"any </call> text", CALLED]) and not admits(until, [*b"a", CALL, CALL, CALLED])
    assert admits(of({"type": "token", "token": "<call>"}), [CALL]) and admits(
        of({"type": "token", "token": CALL}), [CALL]
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "string"}},
        {"regex": "(?s:.)*"},
        {"choice": ["<call>"]},
        {"grammar": "root ::= .*"},
        {"json_object": True},
    ],
    ids=str,
)
def test_no_grammar_takes_a_special_token_for_letters(asked: dict[str, Any]) -> None:
    """Its text is never shown, so no grammar of texts admits it, at any place of an output."""
    start, seen = matcher(asked), 0
    for text in '{"<call>": "', '"<call', "<call", "":
        one = start.deep_copy()
        one.try_consume_tokens(list(text.encode()))
        mask = one.compute_bitmask()
        seen += bool(mask[0] or any(mask[1:32]))
        assert not mask[CALL // 8] >> CALL % 8 & 1 and not mask[CALLED // 8] >> CALLED % 8 & 1
    assert seen > 1 and END == 256


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"type": "qwen_xml_parameter"}, "formats of type 'qwen_xml_parameter' cannot be followed; use const_string"),
        ({"type": []}, "formats of type"),
        (3, "a format must be an object"),
        (tag("<n>", {"type": "json_schema", "json_schema": {"not": {}}}, ""), "not at # cannot be held"),
        (tag("<n>", INTEGER, "0"), "not clear where a part of it ends"),
        ({"type": "sequence", "elements": [ANY, INTEGER]}, "not clear where a part of it ends"),
        (tag("<n>", {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, "</n>"), "lead to themselves"),
        ({**TRIGGERED, "triggers": ["<g"]}, "must start with one of the triggers"),
        ({**TRIGGERED, "tags": [tag("<f", INTEGER, "</f>"), tag("<f=a", INTEGER, "</f>")]}, "is the beginning of"),
        ({"type": "const_string", "value": 3}, "value must be text"),
        ({**TRIGGERED, "triggers": ["5"], "tags": [tag(5, INTEGER, "")]}, "each with a text as its begin"),  # type: ignore[arg-type]
        (tag("<n>", ANY, ["</n>", "</n>b"]), "is the beginning of"),
        ({**SEPARATED, "tags": [ANY]}, "tags must be of type tag"),
        ({"type": "token", "token": 65}, "not a special token"),
        ({"type": "or", "elements": []}, "elements must be a list"),
        ({**ANY, "excludes": ["x"]}, "excludes cannot be followed"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals(given: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        of(given)


def test_nesting() -> None:
    given: Any = INTEGER
    for _ in range(150):
        given = {"type": "optional", "content": given}
    with pytest.raises(ValueError, match="nested more than"):
        of(given)
    with pytest.raises(ValueError, match="nested more than"):
        matcher({"structural_tag": '{"a":' * 30_000})
