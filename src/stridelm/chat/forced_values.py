"""Arguments of forced calls as formats of a structural tag (grammar/structural_tag.py), where they are not JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stridelm.chat.schema_types import resolved

Format = dict[str, Any]
MOST_OPTIONAL = 32
"""Parameters of which none is required, where commas stand between them: their formats grow with the square."""
LARGEST_DEFINITIONS = 1 << 18
"""Characters of all copies of a schema's definitions: each parameter that refers to them has its own."""
LIMITS_OF_TEXT = ("pattern", "format", "minLength", "maxLength")


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def sequence(elements: Sequence[Format]) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def optional(elements: Sequence[Format]) -> Format:
    return {"type": "optional", "content": sequence(elements)}


def either(elements: Sequence[Format]) -> Format:
    return {"type": "or", "elements": list(elements)}


def json_value(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Format:
    """A value as JSON. Its schema is a part of another, with the definitions that it may refer to."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if definitions and '"$ref"' in json.dumps(schema):
        schema = {**definitions, **schema}
    return {"type": "json_schema", "json_schema": dict(schema)}


def properties_of(schema: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The properties of a schema, and those that are required. Raises ValueError for one that is more than that."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if more := [key for key in ("$ref", "allOf", "anyOf", "oneOf", "patternProperties") if key in schema]:
        raise ValueError(f"parameters with {more[0]} cannot be forced in this model's format; write properties")
    if not isinstance(properties, dict) or not all(isinstance(one, dict) for one in properties.values()):
        raise ValueError("parameters must be an object with properties, each with a schema of its own")
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ValueError("required must be a list of names")
    if missing := [key for key in required if key not in properties]:
        raise ValueError(f"the required parameter {missing[0]!r} has no schema")
    if "$defs" in schema or "definitions" in schema:
        size = len(json.dumps([schema.get("$defs"), schema.get("definitions")]))
        if size * sum('"$ref"' in json.dumps(one) for one in properties.values()) > LARGEST_DEFINITIONS:
            raise ValueError("parameters with so many definitions cannot be forced in this model's format")
    return properties, required


def at_root(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters where they are no more than a reference to a definition."""
    if not isinstance(schema.get("$ref"), str):
        return dict(schema)
    found = resolved(schema["$ref"], schema)
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**definitions, **found} if isinstance(found, dict) else dict(schema)


def check_free_text(key: str, schema: Mapping[str, Any]) -> None:
    """Raises ValueError for text that is limited by more than where it ends."""
    written = json.dumps(schema)
    if any(f'"{limit}"' in written for limit in LIMITS_OF_TEXT):
        raise ValueError(f"parameter {key!r}: only text without pattern, format and lengths can be forced here")


def listed(pairs: Mapping[str, list[Format]], required: Sequence[str], comma: str) -> list[Format]:
    """Pairs with commas between: those that are required, then any of the others, in order."""
    needed = [pair for key, pair in pairs.items() if key in required]
    spare = [pair for key, pair in pairs.items() if key not in required]
    if needed:
        parts = [part for i, pair in enumerate(needed) for part in ([const(comma)] if i else []) + pair]
        return parts + [optional([const(comma), *pair]) for pair in spare]
    if len(spare) > MOST_OPTIONAL:
        raise ValueError(f"of more than {MOST_OPTIONAL} parameters one must be required, or they cannot be forced here")
    firsts = [
        sequence([*pair, *(optional([const(comma), *later]) for later in spare[number + 1 :])])
        for number, pair in enumerate(spare)
    ]
    return [optional([either(firsts)])] if firsts else []
