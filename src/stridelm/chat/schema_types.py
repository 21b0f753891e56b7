"""Gives arguments that a model wrote as plain text the types that their JSON schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
PYTHON = {"True": True, "False": False, "None": None}
"""What models that were trained on Python write."""


def types_of(schema: Any, root: Any = None) -> tuple[str, ...]:
    """The types that a schema allows; empty if it does not say. root: the schema that references lead into."""
    return tuple(dict.fromkeys(_types(schema, root, set())))


def _types(schema: Any, root: Any, seen: set[str]) -> list[str]:
    """seen: references that were followed. Each is followed once, so the work is bounded by the schema's size."""
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type")
    found = [one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str)]
    reference = schema.get("$ref")
    if not found and isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        return _types(resolved(reference, root), root, seen)
    values: list[Any] = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not found:
        found += map(_type_of, values)
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in _list(schema.get(key)):
            found += _types(branch, root, seen)
    if schema.get("nullable") is True:
        found.append("null")
    return found


def words_of(schema: Any, root: Any = None) -> list[Any] | None:
    """The values that a schema allows, if it lists them."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        schema = resolved(schema["$ref"], root)
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return list(schema["enum"])
    if schema.get("type") == "null":
        return [None]
    branches = schema.get("anyOf", schema.get("oneOf"))
    found = [words_of(branch, None) for branch in branches] if isinstance(branches, list) and branches else [None]
    return None if any(words is None for words in found) else [word for words in found for word in words or []]


def typed(text: str, schema: Any, root: Any = None) -> Any:
    """The value that a text means under a schema. Text of no allowed type stays text; without a schema, whatever is
    JSON is that."""
    types = types_of(schema, root)
    if types == ("string",):
        return text
    bare = text.strip()
    value: Any
    if bare in PYTHON:
        value = PYTHON[bare]
    else:
        try:
            value = json.loads(bare, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return text
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return int(value)
    return value if not types or any(_fits(value, kind) for kind in types) else text


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, KINDS.get(kind, ()))


def _type_of(value: Any) -> str:
    return "string" if isinstance(value, str) else next((kind for kind in KINDS if _fits(value, kind)), "")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def resolved(ref: str, root: Any) -> Any:
    """What a reference of the form #/a/b leads to; None if that is nothing."""
    found = root
    for step in ref.removeprefix("#/").split("/") if ref.startswith("#/") else ():
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
