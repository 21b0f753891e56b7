"""All of a JSON schema is held, or the schema is refused with the keyword and its place."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest

from fuzz.schemas import judge, random_schema
from stridelm.grammar.json_schema import NO_EFFECT, REFUSED, held_schema
from support.checks.grammar_bytes import admits, matcher, random_output, written
from support.oracles.schema_suite import DRAFTS, NARROWER, instances, suite

HALF_PAIR = "\ud83d"
CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat", "default": "cat"}, "n": {"type": "integer"}},
    "required": ["n"],
}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}
NODE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
    "required": ["next"],
}


def start_of(schema: Any) -> Any:
    return matcher({"json": json.dumps(schema)})


@pytest.mark.parametrize("part", range(4))
def test_random_schemas(part: int) -> None:
    """Random outputs of random schemas, of those that are accepted, are valid."""
    finished = 0
    for seed in range(75 * part, 75 * (part + 1)):
        draw = Random(seed)
        schema = random_schema(draw)
        try:
            start = start_of(schema)
        except ValueError:
            continue
        for _ in range(3):
            output = random_output(start, draw)
            if output is not None:
                finished += 1
                assert (why := judge(schema, output.decode())) is None, (seed, schema, output, why)
    assert finished > 150


@pytest.mark.parametrize("draft", DRAFTS)
def test_published_suite(draft: str) -> None:
    """Each schema of the JSON-Schema-Test-Suite that is accepted admits its valid instances and refuses the others, if
    objects are as open as the standard has them."""
    accepted, wrong = 0, []
    for case in suite(draft):
        try:
            start = written(f"start: %json {held_schema(json.dumps(case.schema), closed=False)}")
        except ValueError:
            continue
        accepted += 1
        for test in case.tests:
            found = any(admits(start, text) for text in instances(test["data"]))
            if found != test["valid"] and not (
                test["valid"] and NARROWER.search(f"{case.file}: {test['description']}")
            ):
                wrong.append((case.file, case.description, test["description"], found))
    assert wrong == []
    assert accepted > 90


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        *(
            ({"properties": {"a": {keyword: {"a": ["b"]}}}}, f"{re.escape(keyword)} at #/properties/a cannot be held")
            for keyword in sorted(REFUSED - {"if"})
        ),
        ({"items": {"if": {}, "then": {}}}, "if at #/items cannot be held"),
        ({"uniqueItems": True}, "uniqueItems at # cannot be held; leave it out"),
        ({"oneOf": [{"enum": [3, 4]}, {"enum": [4, 5]}]}, "oneOf at # has branches"),
        (  # apart once they are closed, but {"x": 0} matches both
            {"oneOf": [{"type": "object", "properties": {"x": {"const": 0}}, "required": ["x"]}, {"properties": {}}]},
            "oneOf at # has branches",
        ),
        ({"anyOf": [{"type": "string"}], "oneOf": [{"type": "string"}]}, "oneOf at # cannot be held beside anyOf"),
        ({"format": "iri"}, "format at # iri cannot be held"),
        ({"type": "string", "pattern": "^(?!a)[a-b]$"}, "pattern at # look-around"),
        ({"patternProperties": {"(": {}}}, "patternProperties at # it is not a regular expression"),
        ({"type": "strin"}, "type at # must be out of null"),
        ({"enum": []}, "enum at # must be a list"),
        ({"minLength": "a"}, "minLength at # must be a number"),
        ({"minLength": -1}, "minLength at # must be a whole number"),
        ({"minimum": 2**70}, "minimum at # is beyond 2"),
        ({"multipleOf": 0}, "multipleOf at # must be above 0"),
        ({"const": HALF_PAIR}, "const at # holds half a surrogate pair"),
        ({"properties": {HALF_PAIR: True}}, "properties at # holds half a surrogate pair"),
        ({"enum": ["\x01"]}, "enum at # holds a control character"),
        ({"$ref": "#"}, "leads back to itself"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
            "leads back to itself",
        ),
        ({"$ref": "#/$defs/a"}, "which is not there"),
        ({"$ref": "http://127.0.0.1:1/x"}, "only places within the schema"),
        ({"items": {"$id": "x"}}, r"\$id at #/items would change"),
        ({"items": [{}, {}]}, "prefixItems since draft 2020-12"),
        ({"type": "object", "minProperties": 3}, "minProperties at # above 1"),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 0.2},
            "exclusiveMinimum at # cannot be held with a maximum",
        ),
        ({"allOf": [{"exclusiveMaximum": 0}, {"minimum": -0.5}]}, "exclusiveMaximum at #/allOf/0 cannot be held"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        (False, "nothing can match it"),
        ({"allOf": 5}, "allOf at # must be a list"),
        ({"$ref": "#/$defs/a", "$defs": {"a": ENDLESS}}, "nothing can match it"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}},
            "nothing can",
        ),
        ([], "must be a JSON schema"),
        (json.loads('{"items":' * 300 + "1" + "}" * 300), "nested"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(schema: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        start_of(schema)


@pytest.mark.parametrize("text", ["{", "[" * 30_000, '{"const": NaN}', '{"minimum": 1e999}', "\x00", ""])
def test_texts_that_are_not_schemas(text: str) -> None:
    with pytest.raises(ValueError, match="structured_outputs: the json cannot be followed"):
        matcher({"json": text})


def test_keywords_without_effect() -> None:
    """A keyword in a form that says nothing is accepted, and so are annotations and keywords of nobody's standard."""
    for keyword, values in NO_EFFECT.items():
        for value in values:
            assert admits(start_of({"type": "array", "items": {"type": "null"}, keyword: value}), "[null,null]")
    noted = {"type": "null", "title": "t", "default": 3, "x-order": {"not": {}}, "nullable": True, "if": {"const": 1}}
    assert admits(start_of(noted), "null")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ['"abc"'], ['"abcd"', '""']),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"2000-02-29"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-04-31"'],
        ),
        (
            {"type": "string", "format": "date-time", "pattern": "^2"},
            ['"2024-01-01T00:00:00Z"'],
            ['"1999-01-01T00:00:00Z"'],
        ),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
                ]
            },
            ['{"a": 1, "b": null}'],
            ['{"a": 1}', "1"],
        ),
        (
            {"properties": {"a": {"type": "integer"}}, "type": "object", "additionalProperties": True},
            ['{"a": 1, "b": 2}'],
            ['{"b": 2, "\\u0061": "x"}', '{"a": 1, "\\u0061": "x"}'],
        ),
        (
            {
                "$defs": {
                    "n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
                },
                "$ref": "#/$defs/n",
            },
            ["{}", '{"n": {"n": {}}}'],
            ['{"m": {}}'],
        ),
        (
            {
                "components": {"schemas": {"a/b": {"type": "null"}}},
                "items": {"$ref": "#/components/schemas/a~1b"},
                "type": "array",
            },
            ["[null]"],
            ["[1]"],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "type": "integer",
                "minimum": 1,
                "exclusiveMinimum": True,
            },
            ["2"],
            ["1"],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "items": [{"type": "null"}],
                "additionalItems": False,
                "type": "array",
            },
            ["[null]", "[]"],
            ["[1]", "[null, 1]"],
        ),
        ({"x-guidance": {"lenient": True}, "type": "string", "maxLength": 1}, ['"a"'], ['"aa"']),
        ({"const": 'q"\\/\n'}, ['"q\\"\\\\/\\n"'], ['"q"']),
        ({"enum": ["👍", "é"]}, ['"👍"'], ['"x"']),
        (True, ["1", "{}", '"a"'], ["", "x"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_meaning(schema: Any, good: list[str], bad: list[str]) -> None:
    start = start_of(schema)
    assert [text for text in good if not admits(start, text)] == []
    assert [text for text in bad if admits(start, text)] == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {}}, "type": "object"}, ['{"a": 1}', "{}"], ['{"a": 1, "b": 1}', '{"b": 1}']),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {}}}}}, ['{"a": 1}'], ['{"b": 1}']),
        ({"allOf": [{"properties": {"a": {}}, "type": "object"}], "title": "t"}, ['{"a": 1}'], ['{"b": 1}']),
        (
            {"anyOf": [{"properties": {"a": {}}, "type": "object"}, {"type": "null"}]},
            ['{"a": 1}', "null"],
            ['{"b": 1}'],
        ),
        (
            {"properties": {"a": {}}, "anyOf": [{"required": ["b"]}, {"required": ["a"]}], "type": "object"},
            ['{"b": 1}'],
            ["{}"],
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}}}],
                "$defs": {"a": {"properties": {"a": {}}}},
                "type": "object",
            },
            ['{"a": 1, "b": 1}'],
            [],
        ),
        ({"type": "object"}, ['{"b": 1}'], []),
        (
            {"properties": {"a": {}}, "additionalProperties": {"type": "null"}, "type": "object"},
            ['{"b": null}'],
            ['{"b": 1}'],
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_objects_are_closed(schema: Any, good: list[str], bad: list[str]) -> None:
    """No property is added of which the schema does not speak, unless schemas are combined, each with its own."""
    start = start_of(schema)
    assert [text for text in good if not admits(start, text)] == []
    assert [text for text in bad if admits(start, text)] == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}], "$defs": {"C": CAT, "D": DOG}},
            ['{"kind": "cat", "n": 1}', '{"kind": "wolf"}'],
            ['{"n": 1}', '{"kind": "dog", "n": 1}', "{}"],
        ),
        (
            {
                "oneOf": [{"type": "integer"}, {"type": "null"}, {"$ref": "#/$defs/s"}],
                "$defs": {"s": {"type": "string"}},
            },
            ["1", "null", '"a"'],
            ["true"],
        ),
        (
            {"properties": {"p": {"$ref": "#/$defs/a"}}, "type": "object", "$defs": {"a": ENDLESS}},
            ["{}"],
            ['{"p": {"x": 1}}'],
        ),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": ENDLESS}}, ["null"], ["{}"]),
        ({"$ref": "#/$defs/n", "$defs": {"n": NODE}}, ['{"next": {"next": null}}'], ['{"next": {}}']),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
            ["[[], [[]]]"],
            ["[1]"],
        ),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            ["-5", "9007199254740992"],
            ["9007199254740993"],
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_references(schema: Any, good: list[str], bad: list[str]) -> None:
    """Branches are told apart through references, and what has no finite value is never begun."""
    start = start_of(schema)
    assert [text for text in good if not admits(start, text)] == []
    assert [text for text in bad if admits(start, text)] == []
    assert start.deep_copy().try_consume_tokens(list(b'{"p"')) != 4


@pytest.mark.parametrize("levels", [100, 400, 3000])
def test_chains_of_references(levels: int) -> None:
    """A chain that would overflow the stack of the library, and end the process, is refused."""
    links: dict[str, Any] = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(levels)}
    chain = {"$ref": "#/$defs/a0", "$defs": links | {f"a{levels}": {"type": "null"}}}
    if levels == 100:
        assert admits(start_of(chain), "[[[]]]")
    else:
        with pytest.raises(ValueError, match="nested too deep"):
            start_of(chain)


@pytest.mark.parametrize("keyword", ["pattern", "patternProperties"])
@pytest.mark.parametrize("expression", [r"^ab\x01$", r"^ab\x7f$", r"\x0b", r"^(ab\x01|ac)$", "\x01"])
def test_characters_that_outputs_never_hold(keyword: str, expression: str) -> None:
    """An expression that asks for one, spelt in any way, is refused, and a class leaves them out."""
    with pytest.raises(ValueError, match="control character"):
        start_of({keyword: expression if keyword == "pattern" else {expression: {}}})
    start = start_of({"type": "string", "pattern": r"^[\x00-\x1fa]$"})
    assert (
        admits(start, '"a"') and admits(start, r'"\n"') and not admits(start, r'"\u0001"') and not admits(start, '""')
    )


def test_white_space_ends() -> None:
    """At most 16 characters of white space stand between two parts."""
    start = start_of({"type": "array", "items": {"type": "null"}})
    assert admits(start, f"[{' ' * 16}]") and not admits(start, f"[{' ' * 17}]") and not admits(start, " []")
