"""Random JSON schemas out of the keywords that are held, and what an output of one has to satisfy.

The judge is the package `jsonschema`, which reads the schema as it was asked for. Numbers are compared as decimals,
since floats have rounding errors of their own.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from random import Random
from typing import Any

from jsonschema import Draft202012Validator

PATTERNS = [
    "^[a-z]{1,4}$",
    "a",
    "^x|y$",
    r"^\d{2,3}$",
    r"^[A-C]+\s?$",
    "^(ab|c)*$",
    r"^\w{1,3}$",
    "^.{2}$",
    r"[^\W_]{2}$",
]
FORMATS = ["date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "int32"]
NAMES = ["a", "b", "ab", "key", "x y", 'q"', "é"]
LEAVES = [None, True, False, 0, 1, -3, 2.5, 1e3, "a", "ab", "é😀", 'q"\\/\n', [], {}, [1], {"a": 1}]


def random_schema(draw: Random, level: int = 0) -> Any:
    """A schema; most outputs of most of them are short."""
    kinds = [_integer, _number, _text, _values, _values]
    if level < 3:
        kinds += [_array, _object, _object, _both, _reference]
    schema = draw.choice(kinds)(draw, level)
    if draw.random() < 0.1:
        schema = {**schema, "title": "t", "description": "d", "x-mine": {"not": {}}}
    if level == 0 and "#/$defs/" in json.dumps(schema):
        schema = {**schema, "$defs": {name: random_schema(draw, 2) for name in "abc"}}
    return schema


def judge(schema: Any, text: str) -> str | None:
    """Why a finished output does not satisfy the schema; None if it does."""
    try:
        value = json.loads(text, parse_float=_decimal)
    except ValueError as error:
        return f"not JSON: {error}"
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = Draft202012Validator(exact, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return next((str(broken.message) for broken in validator.iter_errors(value)), None)


def _decimal(text: str) -> Decimal:
    """Numbers whose exponent is beyond all limits are infinite or 0."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal("0" if "e-" in text.lower() else "-Infinity" if text.startswith("-") else "Infinity")


def _integer(draw: Random, level: int) -> dict[str, Any]:
    return {"type": "integer", **_bounds(draw, lambda: draw.choice([draw.randint(-20, 20), draw.randint(-2000, 2000)]))}


def _number(draw: Random, level: int) -> dict[str, Any]:
    return {"type": "number", **_bounds(draw, lambda: draw.choice([draw.randint(-9, 9), draw.randint(-99, 99) / 10]))}


def _bounds(draw: Random, value: Any) -> dict[str, Any]:
    bounds: dict[str, Any] = {}
    low, high = sorted((value(), value()))
    if draw.random() < 0.6:
        bounds[draw.choice(["minimum", "exclusiveMinimum"])] = low
    if draw.random() < 0.6:
        bounds[draw.choice(["maximum", "exclusiveMaximum"])] = high
    if draw.random() < 0.3:
        bounds["multipleOf"] = draw.choice([1, 2, 3, 5, 0.5, 0.1, 0.25, 7])
    return bounds


def _text(draw: Random, level: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if draw.random() < 0.5:
        schema["maxLength"] = draw.randint(0, 6)
    if draw.random() < 0.3:
        schema["minLength"] = draw.randint(0, 3)
    if draw.random() < 0.4:
        schema["pattern"] = draw.choice(PATTERNS)
    elif draw.random() < 0.3:
        schema = {"type": "string", "format": draw.choice(FORMATS)}
    return schema


def _values(draw: Random, level: int) -> dict[str, Any]:
    if draw.random() < 0.3:
        return {"const": draw.choice(LEAVES)}
    return {"enum": draw.sample(LEAVES, draw.randint(1, 4))}


def _array(draw: Random, level: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "maxItems": draw.randint(0, 4)}
    if draw.random() < 0.8:
        schema["items"] = random_schema(draw, level + 1) if draw.random() < 0.9 else draw.random() < 0.5
    if draw.random() < 0.3:
        schema["prefixItems"] = [random_schema(draw, level + 1) for _ in range(draw.randint(1, 2))]
    if draw.random() < 0.4:
        schema["minItems"] = draw.randint(0, 2)
    if draw.random() < 0.1:
        schema["uniqueItems"] = False
    return schema


def _object(draw: Random, level: int) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(0, 3))
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(draw, level + 1) for name in names}}
    if draw.random() < 0.7:
        schema["required"] = (
            draw.sample(NAMES, draw.randint(0, 2)) if draw.random() < 0.2 else names[: draw.randint(0, 3)]
        )
    chance = draw.random()
    if chance < 0.5:
        schema["additionalProperties"] = False
    elif chance < 0.7:
        schema["additionalProperties"] = random_schema(draw, level + 1)
    if draw.random() < 0.2:
        schema["patternProperties"] = {draw.choice(["^z", "^[0-9]+$", "q"]): random_schema(draw, level + 1)}
    if draw.random() < 0.2:
        schema[draw.choice(["minProperties", "maxProperties"])] = draw.randint(0, 3)
    items = list(schema.items())
    if draw.random() < 0.3:
        draw.shuffle(items)
    return dict(items)


def _both(draw: Random, level: int) -> dict[str, Any]:
    keyword = draw.choice(["anyOf", "oneOf", "allOf", "allOf"])
    kind = draw.choice([_object, _text, _integer, random_schema])
    parts = [kind(draw, level + 1) for _ in range(draw.randint(1, 3))]
    schema: dict[str, Any] = {keyword: parts}
    if draw.random() < 0.3:
        schema.update(kind(draw, level + 1))
    if draw.random() < 0.3:
        schema["type"] = draw.choice(["object", "string", "integer", ["string", "integer", "null"]])
    return schema


def _reference(draw: Random, level: int) -> dict[str, Any]:
    """To one of the definitions that `random_schema` puts at the root."""
    return {"$ref": f"#/$defs/{draw.choice('abc')}", **({"maxLength": 5} if draw.random() < 0.2 else {})}
