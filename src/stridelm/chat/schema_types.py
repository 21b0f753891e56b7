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


def types_of(schema: Any, root: Any = None, level: int = 0) -> tuple[str, ...]:
    """The types that a schema allows; empty if it does not say. root: the schema that references lead into."""
    if not isinstance(schema, dict) or level > 16:
        return ()
    declared = schema.get("type")
    found = [one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str)]
    if not found and isinstance(schema.get("$ref"), str):
        return types_of(_resolved(schema["$ref"], root), root, level + 1)
    values: list[Any] = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not found:
        found += map(_type_of, values)
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in _list(schema.get(key)):
            found += types_of(branch, root, level + 1)
    if schema.get("nullable") is True:
        found.append("null")
    return tuple(dict.fromkeys(found))


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


def _resolved(ref: str, root: Any) -> Any:
    """What a reference of the form #/a/b leads to; None if that is nothing."""
    found = root
    for step in ref.removeprefix("#/").split("/") if ref.startswith("#/") else ():
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
