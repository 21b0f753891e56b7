"""The bodies of tool calls: how arguments stand in a model's text, read back as JSON, and as formats for the grammar of
a forced call.

A body that is not complete or not valid is an error: the caller shows it as text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from stridelm.chat.schema_types import typed, types_of

Format = dict[str, Any]
"""A format of a structural tag (grammar/structural_tag.py)."""
Named = tuple[str, str]
"""A function's name and its arguments, as the text of a JSON object."""
MAX_LEVELS = 8
LONGEST_PYTHON = 1 << 15
"""Characters, which Python's parser reads in some hundredths of a second."""
SPACE = re.compile(r"\s*")


class Body(Protocol):
    """What stands between the beginning and the end of a call."""

    def read(self, body: str, name: str | None, parameters: Mapping[str, Any]) -> list[Named]:
        """The calls in a body. name: if what precedes the body says it. parameters: name -> JSON schema, by which
        arguments that are plain text get types. Raises ValueError for what is not complete and valid."""

    def forced(self, schema: Mapping[str, Any]) -> list[Format]:
        """What the model may write as the body of a call with these parameters. Raises ValueError for what cannot be
        forced."""

    @property
    def delimiters(self) -> Sequence[str]:
        """Texts within a body that may be special tokens."""


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


@dataclass(frozen=True)
class JsonArguments:
    """The arguments as a JSON object. fence: may follow it."""

    fence: str = ""
    delimiters = ()

    def read(self, body: str, name: str | None, parameters: Mapping[str, Any]) -> list[Named]:
        text = body.strip().removesuffix(self.fence.strip()) if self.fence else body
        if name is None:
            raise ValueError("the call has no name")
        return [(name.strip(), _object(text.strip() or "{}"))]

    def forced(self, schema: Mapping[str, Any]) -> list[Format]:
        return [{"type": "json_schema", "json_schema": schema}]


@dataclass(frozen=True)
class JsonObject:
    """A JSON object with name and arguments, or a list of them. separator: between several."""

    separator: str = ""
    delimiters = ()

    def read(self, body: str, name: str | None, parameters: Mapping[str, Any]) -> list[Named]:
        if name is not None:
            return JsonArguments().read(body, name, parameters)
        calls: list[_Call] = []
        gap = re.compile(rf"\s*{re.escape(self.separator)}?\s*")
        text, begin = body.strip(), 0
        while begin < len(text):
            try:
                _, end = json.JSONDecoder().raw_decode(text, begin)
                found = msgspec.json.decode(text[begin:end], type=list[_Call] | _Call)
            except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                raise ValueError("it is not a JSON object with a name and arguments") from error
            calls += found if isinstance(found, list) else [found]
            begin = _end_of(gap, text, end)
        if not calls:
            raise ValueError("there is no call in it")
        return [(call.name, _object(bytes(call.arguments or call.parameters or b"{}").decode())) for call in calls]

    def forced(self, schema: Mapping[str, Any]) -> list[Format]:
        return [{"type": "json_schema", "json_schema": schema}]


@dataclass(frozen=True)
class Parameters:
    """Each argument between marks of its own. write: what precedes its name, what follows that, and what follows its
    value. before, after: a pattern with the name, and possibly whether the value is text, and what ends a value. end:
    may follow the last."""

    write: tuple[str, str, str]
    before: str
    after: str
    end: str = ""
    delimiters = ()

    def read(self, body: str, name: str | None, parameters: Mapping[str, Any]) -> list[Named]:
        if name is None:
            raise ValueError("the call has no name")
        schema = parameters.get(name)
        schemas = schema.get("properties") if isinstance(schema, dict) else None
        found: dict[str, Any] = {}
        text = body.strip()
        if self.end:
            if not text.endswith(self.end):
                raise ValueError("it is not complete")
            text = text.removesuffix(self.end).rstrip()
        before, begin = re.compile(self.before), 0
        while begin < len(text):
            head = before.match(text, begin)
            end = text.find(self.after, head.end()) if head is not None else -1
            if head is None or end < 0:
                raise ValueError("it is not a list of arguments")
            key, value = head.group(1).strip(), text[head.end() : end].removeprefix("\n").removesuffix("\n")
            is_text = head.group(2) if before.groups > 1 else None
            found[key] = value if is_text == "true" else typed(value, (schemas or {}).get(key), root=schema)
            begin = _end_of(SPACE, text, end + len(self.after))
        return [(name, json.dumps(found, ensure_ascii=False, allow_nan=False))]

    def forced(self, schema: Mapping[str, Any]) -> list[Format]:
        required = schema.get("required") or ()
        values = {key: self._value(key, one, schema) for key, one in _properties(schema).items()}
        return [value if key in required else _optional([value]) for key, value in values.items()]

    def _value(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Format:
        before, middle, after = self.write
        types = types_of(schema, root)
        is_text = types == ("string",)
        begin = before + key + middle.replace("{text}", "true" if is_text else "false")
        if not is_text:
            content: Format = {"type": "json_schema", "json_schema": _rooted(schema, root)}
        elif "enum" in schema or "const" in schema:
            words = schema.get("enum", [schema.get("const")])
            content = {"type": "or", "elements": [{"type": "const_string", "value": word} for word in words]}
        elif schema.keys() & {"pattern", "format", "minLength", "maxLength"}:
            raise ValueError(f"parameter {key!r}: only text without pattern, format and lengths can be forced here")
        else:
            content = {"type": "any_text"}
        return {"type": "tag", "begin": begin, "content": content, "end": after}


@dataclass(frozen=True)
class LooseJson:
    """A JSON object with bare keys and strings between marks of their own."""

    quote: str

    @property
    def delimiters(self) -> Sequence[str]:
        return (self.quote,)

    def read(self, body: str, name: str | None, parameters: Mapping[str, Any]) -> list[Named]:
        from transformers.utils.chat_parsing.content_parsers import parse_content

        if name is None:
            raise ValueError("the call has no name")
        options = {"unquoted_keys": True, "string_delims": [[self.quote, self.quote]]}
        try:
            value = parse_content(body.strip() or "{}", "json", options)
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        if not isinstance(value, dict):
            raise ValueError("the arguments are not an object")
        return [(name, json.dumps(value, ensure_ascii=False, allow_nan=False))]

    def forced(self, schema: Mapping[str, Any]) -> list[Format]:
        return self._object(schema, schema, 0)

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any], level: int) -> list[Format]:
        properties = _properties(schema)
        if level > MAX_LEVELS:
            raise ValueError(f"parameters that are nested deeper than {MAX_LEVELS} levels cannot be forced here")
        pairs = {key: [_const(f"{key}:"), *self._value(key, one, root, level)] for key, one in properties.items()}
        return [_const("{"), *_listed(pairs, schema.get("required") or (), ","), _const("}")]

    def _value(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any], level: int) -> list[Format]:
        types = types_of(schema, root)
        if types == ("string",):
            words = schema.get("enum", [schema["const"]] if "const" in schema else None)
            if words is not None:
                return [{"type": "or", "elements": [_const(f"{self.quote}{word}{self.quote}") for word in words]}]
            if schema.keys() & {"pattern", "format", "minLength", "maxLength"}:
                raise ValueError(f"parameter {key!r}: only text without pattern, format and lengths can be forced here")
            return [{"type": "tag", "begin": self.quote, "content": {"type": "any_text"}, "end": self.quote}]
        if types == ("object",) and schema.get("properties"):
            return self._object(schema, root, level + 1)
        if not types or set(types) - {"integer", "number", "boolean", "null"}:
            raise ValueError(f"parameter {key!r}: only text, numbers, booleans, null and objects can be forced here")
        return [{"type": "json_schema", "json_schema": _rooted(schema, root)}]


@dataclass(frozen=True)
class PythonCalls:
    """A Python list of calls with keyword arguments."""

    delimiters = ("<|python_start|>", "<|python_end|>")

    def read(self, body: str, name: str | None, parameters: Mapping[str, Any]) -> list[Named]:
        text = body.strip().removesuffix("<|python_end|>").strip()
        if len(text) > LONGEST_PYTHON:
            raise ValueError(f"it has more than {LONGEST_PYTHON} characters")
        try:
            tree = ast.parse(text, mode="eval").body
            if not isinstance(tree, ast.List) or not tree.elts:
                raise ValueError("it is not a list of calls")
            return [self._call(one) for one in tree.elts]
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError("it is not a list of calls") from error

    def _call(self, node: ast.expr) -> Named:
        if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
            raise ValueError("it is not a call with keyword arguments")
        values = {str(one.arg): ast.literal_eval(_Constants().visit(one.value)) for one in node.keywords}
        return ast.unparse(node.func), json.dumps(values, ensure_ascii=False, allow_nan=False)

    def forced(self, schema: Mapping[str, Any]) -> list[Format]:
        values = {
            key: [_const(f"{key}="), {"type": "json_schema", "json_schema": _rooted(one, schema)}]
            for key, one in _properties(schema).items()
        }
        return _listed(values, schema.get("required") or (), ", ")


class _Constants(ast.NodeTransformer):
    """JSON's names of constants, which a forced call has."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id]) if node.id in _JSON else node


_JSON = ("true", "false", "null")


def _const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _properties(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    properties = schema.get("properties") or {}
    if not isinstance(properties, dict) or not all(isinstance(one, dict) for one in properties.values()):
        raise ValueError("parameters must be an object with properties, each with a schema of its own")
    if missing := [key for key in schema.get("required") or () if key not in properties]:
        raise ValueError(f"the required parameter {missing[0]!r} has no schema")
    return properties


def _listed(pairs: Mapping[str, list[Format]], required: Sequence[str], comma: str) -> list[Format]:
    """Pairs with commas between: those that are required, then any of the others, in order."""
    needed = [pair for key, pair in pairs.items() if key in required]
    spare = [pair for key, pair in pairs.items() if key not in required]
    if needed:
        parts = [part for i, pair in enumerate(needed) for part in ([_const(comma)] if i else []) + pair]
        return parts + [_optional([_const(comma), *pair]) for pair in spare]
    last: Format | None = None
    for pair in reversed(spare):
        here = _sequence([*pair, *([] if last is None else [_optional([_const(comma), last])])])
        last = here if last is None else {"type": "or", "elements": [here, last]}
    return [] if last is None else [_optional([last])]


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements}


def _optional(elements: list[Format]) -> Format:
    return {"type": "optional", "content": _sequence(elements)}


def _rooted(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema by itself, with the definitions that it may refer to."""
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def _end_of(pattern: re.Pattern[str], text: str, begin: int) -> int:
    """Where what a pattern matches at a place ends."""
    found = pattern.match(text, begin)
    return begin if found is None else found.end()


def _object(text: str) -> str:
    """The text of a JSON object, checked. Some models write it as a JSON string."""
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            text, value = value, msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("the arguments are not JSON") from error
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise ValueError("the arguments are not an object")
    return text
