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
from keyword import iskeyword
from typing import Any, Protocol

import msgspec

from stridelm.chat.forced_values import (
    Format,
    check_free_text,
    const,
    either,
    json_value,
    listed,
    optional,
    properties_of,
)
from stridelm.chat.schema_types import typed, types_of, words_of

Named = tuple[str, str]
"""A function's name and its arguments, as the text of a JSON object."""
MAX_LEVELS = 8
LONGEST_PYTHON = 1 << 13
"""Characters, which Python's parser reads in some hundredths of a second."""
SCALARS = ("integer", "number", "boolean", "null")
JSON_NAMES = {"true": True, "false": False, "null": None}
BARE_KEY = r"[\w.$@-]{1,256}"


class Body(Protocol):
    """The part of a call between its beginning and its end."""

    def read(self, body: str, name: str, parameters: Mapping[str, Any]) -> list[Named]:
        """The calls in a body. name: empty if nothing before the body says it. parameters: name -> JSON schema, by
        which arguments that are plain text get types. Raises ValueError for what is not complete and valid."""

    def forced(self, schema: Mapping[str, Any]) -> list[Format]:
        """The formats of a body with these parameters. Raises ValueError for parameters that cannot be forced."""

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

    def read(self, body: str, name: str, parameters: Mapping[str, Any]) -> list[Named]:
        text = body.strip().removesuffix(self.fence.strip())
        return [(name.strip(), _object(text.strip() or "{}"))]

    def forced(self, schema: Mapping[str, Any]) -> list[Format]:
        return [{"type": "json_schema", "json_schema": schema}]


@dataclass(frozen=True)
class JsonObject(JsonArguments):
    """A JSON object with name and arguments, or a list of them; only its arguments where the name comes before.
    separator: between several."""

    separator: str = ""

    def read(self, body: str, name: str, parameters: Mapping[str, Any]) -> list[Named]:
        if name:
            return super().read(body, name, parameters)
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
            after = gap.match(text, end)
            assert after is not None  # it may be empty
            begin = after.end()
        if not calls:
            raise ValueError("there is no call in it")
        return [(call.name, _object(bytes(call.arguments or call.parameters or b"{}").decode())) for call in calls]


@dataclass(frozen=True)
class Parameters:
    """Each argument between marks of its own. write: what precedes its name, what follows that, and what follows its
    value. before: a pattern with the name, and possibly whether the value is text. end: follows the last."""

    write: tuple[str, str, str]
    before: str
    end: str = ""
    delimiters = ()

    def read(self, body: str, name: str, parameters: Mapping[str, Any]) -> list[Named]:
        schema = parameters.get(name)
        schemas = schema.get("properties") if isinstance(schema, dict) else None
        found: dict[str, Any] = {}
        text = body.strip()
        if self.end:
            if not text.endswith(self.end):
                raise ValueError("it is not complete")
            text = text.removesuffix(self.end).rstrip()
        after, begin = re.escape(self.write[-1].strip()), 0
        argument = re.compile(rf"{self.before}\n?(.*?)\n?{after}\s*", re.DOTALL)
        while begin < len(text):
            one = argument.match(text, begin)
            if one is None:
                raise ValueError("it is not a list of arguments")
            key, *is_text, value = one.groups()
            key = key.strip()
            found[key] = value if is_text == ["true"] else typed(value, (schemas or {}).get(key), root=schema)
            begin = one.end()
        return [(name, json.dumps(found, ensure_ascii=False, allow_nan=False))]

    def forced(self, schema: Mapping[str, Any]) -> list[Format]:
        properties, required = properties_of(schema)
        values = {key: self._value(key, one, schema) for key, one in properties.items()}
        return [value if key in required else optional([value]) for key, value in values.items()]

    def _value(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Format:
        before, middle, after = self.write
        types, words = types_of(schema, root), words_of(schema, root)
        content: Format = {"type": "any_text"}
        if types and "string" not in types:
            content = json_value(schema, root)
        elif words is not None:
            content = either([const(word if isinstance(word, str) else json.dumps(word)) for word in words])
        else:
            check_free_text(key, schema)
        begin = before + key + middle.replace("{text}", "true" if types == ("string",) else "false")
        head = re.match(self.before, begin)
        if head is None or head.group(1) != key:
            raise ValueError(f"parameter {key!r}: it cannot be told from what surrounds it; rename it")
        return {"type": "tag", "begin": begin, "content": content, "end": after}


@dataclass(frozen=True)
class LooseJson:
    """A JSON object with bare keys and strings between marks of their own."""

    quote: str

    @property
    def delimiters(self) -> Sequence[str]:
        return (self.quote,)

    def read(self, body: str, name: str, parameters: Mapping[str, Any]) -> list[Named]:
        quote = re.escape(self.quote)

        def plain(found: re.Match[str]) -> str:
            return json.dumps(found[1]) if found[2] is None else f"{json.dumps(found[2])}:"

        text = re.sub(rf"{quote}(.*?){quote}|(?<=[{{,])\s*({BARE_KEY})\s*:", plain, body.strip(), flags=re.DOTALL)
        return [(name, _object(text or "{}"))]

    def forced(self, schema: Mapping[str, Any]) -> list[Format]:
        return self._object(schema, schema, 0)

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any], level: int) -> list[Format]:
        properties, required = properties_of(schema)
        if level > MAX_LEVELS:
            raise ValueError(f"parameters that are nested deeper than {MAX_LEVELS} levels cannot be forced here")
        if odd := [key for key in properties if not re.fullmatch(BARE_KEY, key)]:
            raise ValueError(f"parameter {odd[0]!r}: it cannot be told from what surrounds it; rename it")
        pairs = {key: [const(f"{key}:"), *self._value(key, one, root, level)] for key, one in properties.items()}
        return [const("{"), *listed(pairs, required, ","), const("}")]

    def _value(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any], level: int) -> list[Format]:
        words, types = words_of(schema, root), types_of(schema, root)
        if words is not None:
            written = [f"{self.quote}{one}{self.quote}" if isinstance(one, str) else json.dumps(one) for one in words]
            return [either([const(one) for one in written])]
        if types == ("object",) and schema.get("properties"):
            return self._object(schema, root, level + 1)
        if not types or set(types) - {"string", *SCALARS}:
            raise ValueError(f"parameter {key!r}: only text, numbers, booleans, null and objects can be forced here")
        quoted = {"type": "tag", "begin": self.quote, "content": {"type": "any_text"}, "end": self.quote}
        if "string" not in types:
            return [json_value(schema, root)]
        check_free_text(key, schema)
        others = [kind for kind in types if kind != "string"]
        return [either([quoted, json_value({"type": others}, {})]) if others else quoted]


@dataclass(frozen=True)
class PythonCalls:
    """A Python list of calls with keyword arguments."""

    delimiters = ("<|python_start|>", "<|python_end|>")

    def read(self, body: str, name: str, parameters: Mapping[str, Any]) -> list[Named]:
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
        properties, required = properties_of(schema)
        if odd := [key for key in properties if not key.isidentifier() or iskeyword(key)]:
            raise ValueError(f"parameter {odd[0]!r}: it is not a name in Python; rename it")
        values = {key: [const(f"{key}="), json_value(one, schema)] for key, one in properties.items()}
        return listed(values, required, ", ")


class _Constants(ast.NodeTransformer):
    """JSON's names of constants, which a forced call has."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


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
