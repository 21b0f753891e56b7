"""What reading a JSON schema tells: which schemas exclude one another, which have an end, what dates look like."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

HOUR, SIXTY = "([01][0-9]|2[0-3])", "[0-5][0-9]"
LEAP_YEARS = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{LEAP_YEARS}-02-29)"
)
TIME = rf"{HOUR}:{SIXTY}:{SIXTY}(\.[0-9]+)?([zZ]|[+-]{HOUR}:{SIXTY})"
FORMAT_PATTERNS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}[tT]{TIME}$"}
"""Formats that are held as patterns: llguidance's own know no leap years, and leap seconds in every minute."""


def told_apart_by(branches: Sequence[Mapping[str, Any]]) -> str | None:
    """A property of all of these objects that no two of them can have the same value of."""
    shared = [branch.get("properties") for branch in branches]
    if not shared or not all(isinstance(one, dict) for one in shared):
        return None
    for name in shared[0] or ():
        told = [one.get(name) for one in shared if one is not None]
        if all(isinstance(one, dict) for one in told) and all(are_apart(a, b) for a, b in combinations(told, 2)):
            return str(name)
    return None


def are_apart(one: Any, other: Any) -> bool:
    """Whether no value can match both, by their types or listed values alone."""
    one, other = ({} if not isinstance(schema, dict) else schema for schema in (one, other))
    types = [{schema["type"]} if isinstance(schema.get("type"), str) else set() for schema in (one, other)]
    if all(types) and types[0] != types[1] and {*types[0], *types[1]} != {"integer", "number"}:
        return True
    listed = [_listed(schema) for schema in (one, other)]
    return None not in listed and not set(listed[0] or ()) & set(listed[1] or ())


def _listed(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that a schema lists; None if it does not, or lists something else too."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else None


def without(value: Any, lost: Collection[str]) -> Any:
    """A part of a schema of the result, with `false` for what refers to one of these."""
    if isinstance(value, list):
        return [without(one, lost) for one in value]
    if not isinstance(value, dict) or not lost:
        return value
    if isinstance(value.get("$ref"), str) and value["$ref"] in lost:
        return False
    return {name: one if name in ("const", "enum") else without(one, lost) for name, one in value.items()}


def can_end(schema: Any, ending: Collection[str]) -> bool:
    """Whether a value of a schema of the result can be finite. ending: definitions that can."""
    if not isinstance(schema, dict):
        return bool(schema)
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in ending:
        return False
    if not all(can_end(one, ending) for one in schema.get("allOf", ())):
        return False
    if not all(any(can_end(one, ending) for one in schema[name]) for name in ("anyOf", "oneOf") if name in schema):
        return False
    types = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", TYPES)
    return any(_type_can_end(name, schema, ending) for name in types)


def _type_can_end(name: str, schema: Mapping[str, Any], ending: Collection[str]) -> bool:
    if name == "array":
        prefix = schema.get("prefixItems", [])
        items = [*prefix, *[schema.get("items", True)] * (schema.get("minItems", 0) > len(prefix))]
        return all(can_end(one, ending) for one in items[: schema.get("minItems", 0)])
    if name == "object":
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(
            can_end(known.get(one, rest), ending) or "patternProperties" in schema for one in schema.get("required", ())
        )
    return True
