"""Rewrites a JSON schema so that llguidance holds all of it, or refuses it with the keyword and its place.

A keyword of RULES is known to be held. Annotations, and keywords that the standard does not know, say nothing about
what is valid and are dropped. Keywords of REFUSED could be broken by an output. Drafts 4 to 2019-09 are rewritten as
2020-12. References are resolved here, so that one that leads nowhere, elsewhere or back to itself is refused.

Outputs are narrower than instances. Properties come in the order of the schema, and others only if it speaks of them.
Numbers and strings are written in one way where JSON has several, and control characters other than \\b, \\f, \\n,
\\r and \\t not at all. Formats are asserted, and a time has no leap second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from stridelm.grammar.expressions import MAX_NESTING, pattern
from stridelm.grammar.python_regex import search
from stridelm.grammar.schema_facts import FORMAT_PATTERNS, TYPES, are_apart, can_end, told_apart_by, without
from stridelm.values import shortened

Schema = bool | dict[str, Any]
Place = tuple[str, ...]

LARGEST = 2**53
"""Numbers beyond it are not exact as the floats that llguidance computes with."""
MAX_SCHEMAS = 20_000
MAX_LEVELS = 400
"""Schemas within schemas, through references: at some 1,200 llguidance overflows a thread's stack of 2 MiB."""
MAX_JSON_LEVELS = 120
"""Of the JSON text; llguidance reads 128."""
REFUSED = frozenset(
    (
        *("not", "if", "contains", "propertyNames", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that an output could break."""
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords that apply other schemas to the same value."""
OF_OBJECTS = frozenset(("properties", "patternProperties", "additionalProperties"))
NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}
"""Values with which they say nothing."""
REFUSED_FORMATS = frozenset(
    (
        *("idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template", "regex"),
        *("json-pointer", "relative-json-pointer"),
    )
)
"""Formats of the standard that cannot be held. Others that it does not define, such as int32, are annotations."""
HELD_FORMATS = frozenset(["duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"])

OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}", "json_allowed_escapes": 'nrbtf\\"'}
"""Without a limit of white space, an unsure model may emit it endlessly. With escapes by number, llguidance would take
`"\\u0061"` for another key than `"a"`."""


def held_schema(text: str, closed: bool = True) -> str:
    """The schema for llguidance, as JSON. closed: an object with `properties` has no others if the schema says nothing
    of them and is not combined with another one; the standard would allow any.

    Raises ValueError if the text is not a schema, or says what cannot be held."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_NESTING} levels deep") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(schema, bool | dict):
        raise ValueError("it must be a JSON schema: an object, true or false")
    return json.dumps(_Walk(schema, closed).result(), ensure_ascii=True)


class Refusal(ValueError):
    """A keyword that cannot be held, or is wrong."""

    def __init__(self, place: Place, keyword: str | None, problem: str) -> None:
        where = "#" + "".join(f"/{step}" for step in place)
        super().__init__(f"{where} {problem}" if keyword is None else f"{keyword} at {where} {problem}")


class _Walk:
    def __init__(self, root: Schema, closed: bool) -> None:
        self._root, self._closed = root, closed
        self._draft = _draft(root)
        self._count = 0
        self._names: dict[tuple[str, bool], str] = {}
        """Reference, and whether it is combined with others -> the name of its target in the definitions."""
        self._pending: list[tuple[str, bool, Place]] = []
        self._targets: dict[str, Schema] = {}
        self._bounds: list[tuple[str, int | float, Place]] = []
        """All bounds of numbers: keyword, value and place."""

    def result(self) -> dict[str, Any]:
        whole = self._schema(self._root, (), combined=False)
        if whole is False:
            raise ValueError("nothing can match it")
        whole = {} if whole is True else whole
        while self._pending:
            reference, combined, place = self._pending.pop()
            target, found_at = self._resolve(reference, place)
            self._targets[self._names[reference, combined]] = self._schema(target, found_at, combined)
        self._refuse_loops()
        self._refuse_narrow_bounds()
        whole = self._ended(whole)
        self._refuse_depth(whole)
        return {**whole, "x-guidance": OPTIONS, **({"$defs": self._targets} if self._targets else {})}

    def _schema(self, schema: Any, place: Place, combined: bool = False) -> Schema:
        """combined: other schemas apply to the same value."""
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise ValueError(f"it has more than {MAX_SCHEMAS} schemas; make it simpler")
        if len(place) > MAX_JSON_LEVELS:
            raise ValueError("it is nested too deep, with its references; make it simpler")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Refusal(place, None, f"must be a schema; got {shortened(schema)}")
        if "$ref" in schema and self._draft <= 7:
            schema = {"$ref": schema["$ref"]}  # until draft 7, what stands beside a reference is ignored
        in_place = [keyword for keyword in IN_PLACE if keyword in schema]
        several = combined or len(in_place) > 1 or not OF_OBJECTS.isdisjoint(schema)
        several = several or (isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1)
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            result.update(self._keyword(keyword, value, schema, place, several))
        if self._closed and not combined and not in_place and _is_closed(schema):
            result["additionalProperties"] = False
        if schema.get("format") in FORMAT_PATTERNS:
            result["allOf"] = [*result.get("allOf", ()), {"pattern": FORMAT_PATTERNS[schema["format"]]}]
        return result

    def _keyword(
        self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place, several: bool
    ) -> Mapping[str, Any]:
        """What stands for a keyword in the result. several: what it applies to the same value is one of several."""
        if keyword in REFUSED:
            if keyword == "if" and not schema.keys() & {"then", "else"}:
                return {}
            if any(value == harmless and type(value) is type(harmless) for harmless in NO_EFFECT.get(keyword, ())):
                return {}
            raise Refusal(place, keyword, "cannot be held; leave it out")
        if keyword in ("$id", "id") and place and isinstance(value, str):
            if keyword == "$id" or self._draft == 4:
                raise Refusal(place, keyword, "would change what references mean; leave it out")
        if keyword == "$ref":
            return self._reference(value, place, several)
        if keyword == "oneOf":
            return self._one_of(value, schema, place, several)
        if keyword in IN_PLACE:
            return self._list(keyword, value, place, several)
        rule = RULES.get(keyword)
        return {} if rule is None else rule(self, keyword, value, schema, place)

    # Rules: (walk, keyword, value, schema around it, place of that schema) -> what stands for the keyword.

    def _map(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise Refusal(place, keyword, "must be an object of schemas")
        patterned = keyword == "patternProperties"
        return {
            keyword: {
                _pattern(name, keyword, place) if patterned else _written(name, keyword, place): self._schema(
                    one, (*place, keyword, name)
                )
                for name, one in value.items()
            }
        }

    def _list(self, keyword: str, value: Any, place: Place, combined: bool = False) -> Mapping[str, Any]:
        if not isinstance(value, list) or not value:
            raise Refusal(place, keyword, "must be a list of schemas, at least one")
        return {keyword: [self._schema(one, (*place, keyword, str(i)), combined) for i, one in enumerate(value)]}

    def _one_of(self, value: Any, schema: Mapping[str, Any], place: Place, combined: bool) -> Mapping[str, Any]:
        """Branches that exclude one another are as good as anyOf's. Those of a discriminated union do once the property
        that tells them apart is required. llguidance is not asked: objects that are closed (`held_schema`) may exclude
        one another there, and what matches one of them matches both in the standard."""
        if "anyOf" in schema:
            raise Refusal(place, "oneOf", "cannot be held beside anyOf; leave one out")
        branches = [self._followed(one, place) for one in value] if isinstance(value, list) else []
        if all(branch.get("type") == "object" for branch in branches) and (name := told_apart_by(branches)):
            required = [[*dict.fromkeys((*branch.get("required", ()), name))] for branch in branches]
            value = [{**branch, "required": names} for branch, names in zip(branches, required, strict=True)]
        elif not all(are_apart(one, other) for one, other in combinations(branches, 2)):
            raise Refusal(place, "oneOf", "has branches that are not known to exclude one another; use anyOf")
        return {"anyOf": self._list("oneOf", value, place, combined)["oneOf"]}

    def _followed(self, schema: Any, place: Place) -> dict[str, Any]:
        """What a schema that is only a reference leads to; empty for what is not an object."""
        for _ in range(MAX_NESTING):
            if not isinstance(schema, dict) or schema.keys() & {*RULES, *IN_PLACE, *REFUSED} != {"$ref"}:
                break
            self._reference(schema["$ref"], place, False)
            schema, place = self._resolve(schema["$ref"], place)
        return schema if isinstance(schema, dict) else {}

    def _ended(self, whole: dict[str, Any]) -> dict[str, Any]:
        """The same without definitions that have no finite value; references to them are `false`."""
        ending: set[str] = set()
        while more := {name for name, one in self._targets.items() if name not in ending and can_end(one, ending)}:
            ending |= more
        if not can_end(whole, ending):
            raise ValueError("nothing can match it: a $ref that is required leads back to itself")
        lost = {f"#/$defs/{name}" for name in self._targets.keys() - ending}
        self._targets = {name: without(one, lost) for name, one in self._targets.items() if name in ending}
        return {**without(whole, lost)}

    def _refuse_depth(self, whole: dict[str, Any]) -> None:
        """llguidance calls itself for every level, also of references that it has not met before."""
        met: set[str] = set()
        pending: list[tuple[Any, int, int]] = [(whole, 1, 1)]
        while pending:
            one, levels, nested = pending.pop()
            if levels > MAX_LEVELS or nested > MAX_JSON_LEVELS:
                raise ValueError("it is nested too deep, with its references; make it simpler")
            if isinstance(one, dict) and isinstance(one.get("$ref"), str):
                name = one["$ref"].rpartition("/")[2]
                if name in self._targets and name not in met:
                    met.add(name)
                    pending.append((self._targets[name], levels + 1, 3))
            if isinstance(one, dict | list):
                values = one.values() if isinstance(one, dict) else one
                pending += [(value, levels + 1, nested + 1) for value in values if isinstance(value, dict | list)]

    def _prefix(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        return self._list(keyword, value, place)

    def _one(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        return {keyword: self._schema(value, (*place, keyword))}

    def _items(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        """Until 2019-09 a list here is prefixItems, and what follows it is additionalItems."""
        if not isinstance(value, list):
            return self._one(keyword, value, schema, place)
        if self._draft >= 2020:
            raise Refusal(place, keyword, "must be a schema; a list of them is called prefixItems since draft 2020-12")
        prefix = [self._schema(one, (*place, keyword, str(i))) for i, one in enumerate(value)]
        rest = schema.get("additionalItems", True)
        return ({"prefixItems": prefix} if prefix else {}) | {"items": self._schema(rest, (*place, "additionalItems"))}

    def _reference(self, value: Any, place: Place, combined: bool) -> Mapping[str, Any]:
        if not isinstance(value, str):
            raise Refusal(place, "$ref", "must be text")
        if (value, combined) not in self._names:
            self._names[value, combined] = f"d{len(self._names)}"
            self._pending.append((value, combined, place))
        return {"$ref": f"#/$defs/{self._names[value, combined]}"}

    def _resolve(self, reference: str, place: Place) -> tuple[Any, Place]:
        """The schema that a reference leads to, and its place."""
        identity = self._root.get("$id", self._root.get("id")) if isinstance(self._root, dict) else None
        address, _, fragment = reference.partition("#")
        if address and address != str(identity).rstrip("#"):
            raise Refusal(place, "$ref", f"leads to {shortened(reference)}; only places within the schema are read")
        path = unquote(fragment)
        if path and not path.startswith("/"):
            raise Refusal(place, "$ref", f"is {shortened(reference)}; write it as a path, like #/$defs/name")
        target: Any = self._root
        steps = [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]
        for step in steps:
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                raise Refusal(place, "$ref", f"leads to {shortened(reference)}, which is not there")
        return target, tuple(steps)

    def _refuse_loops(self) -> None:
        """A reference that leads to itself without a value in between is never at an end."""
        leads = {name: set(_beside(schema)) for name, schema in self._targets.items()}
        for start in leads:
            seen: set[str] = set()
            pending = [start]
            while pending:
                for name in leads[pending.pop()] - seen:
                    if name == start:
                        raise ValueError("a $ref leads back to itself; nothing can match it")
                    seen.add(name)
                    pending.append(name)

    def _refuse_narrow_bounds(self) -> None:
        """Between an excluded whole number and a bound less than 1 from it, llguidance takes the excluded number too.
        Bounds of different places may be of one value."""
        for keyword, value, place in self._bounds:
            side, other = (1, "aximum") if keyword == "exclusiveMinimum" else (-1, "inimum")
            if keyword.startswith("exclusive") and value == int(value):
                if any(one.endswith(other) and 0 < side * (bound - value) < 1 for one, bound, _ in self._bounds):
                    raise Refusal(place, keyword, f"cannot be held with a m{other} less than 1 from it; leave one out")

    def _type(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        names = value if isinstance(value, list) else [value]
        if not names or any(name not in TYPES for name in names):
            raise Refusal(place, keyword, f"must be out of {', '.join(TYPES)}; got {shortened(value)}")
        return {keyword: list(dict.fromkeys(names)) if isinstance(value, list) else value}

    def _values(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        if keyword == "const":
            return {keyword: _written(value, keyword, place)}
        if not isinstance(value, list) or not value:
            raise Refusal(place, keyword, "must be a list with at least one value")
        return {keyword: [_written(one, keyword, place) for one in value]}

    def _bound(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        if isinstance(value, bool) and self._draft == 4 and keyword.startswith("exclusive"):
            side = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}[keyword]
            return self._bound(keyword, schema[side], {}, place) if value and side in schema else {}
        # Beyond LARGEST a bound is not exact. A narrower one is, where nothing wider than it is asked for.
        sign = 1 if keyword.endswith("aximum") else -1
        if isinstance(value, int | float) and math.isfinite(value) and sign * value > LARGEST:
            value = sign * LARGEST
        self._bounds.append((keyword, _number(value, keyword, place), place))
        return {keyword: value}

    def _multiple(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        if _number(value, keyword, place) <= 0:
            raise Refusal(place, keyword, "must be above 0")
        return {keyword: value}

    def _size(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        number = _number(value, keyword, place)
        if number < 0 or number != int(number):
            raise Refusal(place, keyword, f"must be a whole number of at least 0; got {shortened(value)}")
        if keyword == "minProperties" and number > 1:
            # A key may come twice where keys are free, and counts once.
            required = schema.get("required", [])
            if not isinstance(required, list) or len(set(map(str, required))) < number:
                raise Refusal(place, keyword, "above 1 cannot be held, unless as many are required; leave it out")
            return {}
        return {keyword: int(number)}

    def _required(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise Refusal(place, keyword, "must be a list of texts")
        return {keyword: [_written(name, keyword, place) for name in dict.fromkeys(value)]}

    def _text_pattern(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        if not isinstance(value, str):
            raise Refusal(place, keyword, "must be text")
        return {keyword: _pattern(value, keyword, place)}

    def _format(self, keyword: str, value: Any, schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        if not isinstance(value, str):
            raise Refusal(place, keyword, "must be text")
        if value in REFUSED_FORMATS:
            raise Refusal(place, keyword, f"{value} cannot be held; leave it out")
        if value in HELD_FORMATS:
            return {keyword: value}
        return {}


Rule = Callable[[_Walk, str, Any, Mapping[str, Any], Place], Mapping[str, Any]]
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("properties", "patternProperties"), _Walk._map),
    "prefixItems": _Walk._prefix,
    **dict.fromkeys(("additionalProperties",), _Walk._one),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _Walk._bound),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _Walk._size),
    **dict.fromkeys(("enum", "const"), _Walk._values),
    "items": _Walk._items,
    "type": _Walk._type,
    "multipleOf": _Walk._multiple,
    "required": _Walk._required,
    "pattern": _Walk._text_pattern,
    "format": _Walk._format,
}
"""Keywords that are held, and those of IN_PLACE."""


def _draft(root: Schema) -> int:
    """4, 6, 7, 2019 or 2020, by `$schema`."""
    named = str(root.get("$schema", "")) if isinstance(root, dict) else ""
    for number in (4, 6, 7):
        if f"draft-0{number}" in named:
            return number
    return 2019 if "2019-09" in named else 2020


def _beside(schema: Any) -> Iterator[str]:
    """Names of the definitions that have to match the same value."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for keyword in ("allOf", "anyOf", "oneOf"):
            for one in schema.get(keyword, ()):
                yield from _beside(one)


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """Whether the properties of an object are all that it speaks of."""
    names, required = schema.get("properties"), schema.get("required", ())
    speaks = isinstance(names, dict) and not schema.keys() & {"additionalProperties", "patternProperties"}
    return speaks and isinstance(required, list | tuple) and set(names or ()).issuperset(map(str, required))


def _number(value: Any, keyword: str, place: Place) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refusal(place, keyword, f"must be a number; got {shortened(value)}")
    if abs(value) > LARGEST:
        raise Refusal(place, keyword, "is beyond 2**53, where numbers are not exact; make it smaller or leave it out")
    return value


def _pattern(value: str, keyword: str, place: Place) -> str:
    try:
        return f"^(?:{pattern(search(_written(value, keyword, place)))})$"
    except ValueError as error:
        raise error if isinstance(error, Refusal) else Refusal(place, keyword, str(error)) from error


def _written(value: Any, keyword: str, place: Place) -> Any:
    """The value, if an output can hold it."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += [*one, *one.values()]
        elif isinstance(one, list):
            pending += one
        elif isinstance(one, str):
            if any("\ud800" <= c <= "\udfff" for c in one):
                raise Refusal(place, keyword, "holds half a surrogate pair, which is not Unicode")
            if any((c < " " and c not in "\b\f\n\r\t") or c == "\x7f" for c in one):
                raise Refusal(place, keyword, "holds a control character, which outputs never do")
        elif isinstance(one, int | float) and not isinstance(one, bool) and abs(one) > LARGEST:
            raise Refusal(place, keyword, "holds a number beyond 2**53, where they are not exact")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a value of JSON")
