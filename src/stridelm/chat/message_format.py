"""A model's own form of messages: reasoning and tool calls, as one response template of transformers.

transformers finds the regions of a message; what is in them is read here (arguments.py), so that a region that cannot
be read costs nothing but the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from stridelm.chat.arguments import Named
from stridelm.chat.formats import ReasoningFormat, ToolFormat
from stridelm.chat.schema_types import typed

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
CALLS = "tool_calls"
MARK = "mark:"
"""Before the mark, in the name of the region of a mark around all calls."""
Field = dict[str, Any]


@dataclass(frozen=True)
class CallRegion:
    """Where a call stands. opening: pattern that begins it. ends: what ends it, as a field of a response template says
    it. read: the calls, of what was found and each function's JSON schema of parameters; raises ValueError for what is
    no call. closing: the literal that ends it; if that is none, the end of the message may end it too."""

    opening: str
    ends: Field
    read: Callable[[Mapping[str, str], Mapping[str, Any]], list[Named]]
    closing: str = ""
    at_start: bool = False
    id_style: str = "openai"


@dataclass(frozen=True)
class MessageFormat:
    """reasoning, tools: how they stand in a message; None if they are not looked for. anchor: pattern of what precedes
    a message in a prompt. published: the tokenizer's own response template, by which messages are parsed if there is
    one."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    anchor: str = "(?!)"
    published: Mapping[str, Any] | None = None

    @cached_property
    def call_region(self) -> CallRegion | None:
        """Raises ValueError for a published template that cannot be used."""
        if self.published is not None:
            return _published_region(self.published)
        if self.tools is None:
            return None
        form = self.tools
        ends: Field = {}
        if form.closing:
            ends = {"close": form.closing}
        elif not form.at_start:
            ends = {"close_pattern": f"(?={form.opening})"}

        def read(found: Mapping[str, str], parameters: Mapping[str, Any]) -> list[Named]:
            return form.body.read(found["body"], found.get("name", ""), parameters)

        return CallRegion(form.opening, ends, read, form.closing, form.at_start, form.id_style)

    @property
    def texts(self) -> Sequence[str]:
        """Literals of the format, which may be special tokens."""
        texts: list[str] = []
        if self.reasoning is not None:
            texts += (self.reasoning.open, self.reasoning.close)
        if self.tools is not None:
            form = self.tools
            texts += (form.begin, form.end, form.closing, *form.section, form.opening.replace("\\", ""))
            texts += form.body.delimiters
        if self.published is not None:
            texts.append(json.dumps(self.published, ensure_ascii=False).replace("\\", ""))
        return texts

    @cached_property
    def templates(self) -> dict[tuple[bool, bool], ResponseTemplate]:
        """The regions to look for, by whether calls and reasoning are."""
        return {(c, r): self._compiled(c, r) for c in (False, True) for r in (False, True)}

    def _compiled(self, calls: bool, reasoning: bool) -> ResponseTemplate:
        fields: dict[str, Field] = {"content": dict(RAW)}
        if reasoning and self.reasoning is not None:
            fields["reasoning"] = {"open": self.reasoning.open, "close": self.reasoning.close, **RAW}
        if calls and self.call_region is not None:
            opening, ends = self.call_region.opening, self.call_region.ends
            said = {"opening": "{opening}", "body": "{content}"}
            if self.published is None and "(?P<name>" in opening:
                said["name"] = "{name}"
            fields[CALLS] = {"open_pattern": f"(?P<opening>{opening})", **ends, **RAW, "transform": said}
            around = self.tools.section if self.tools is not None and self.tools.closing else ()
            for mark in filter(None, map(str.strip, around)):  # left out: a region that ends where it begins
                fields[MARK + mark] = {"open": mark, "close_pattern": "(?=.)", **RAW}
        return load_response_template({"start_anchor_pattern": self.anchor, "fields": fields})


RAW: Field = {"content": "text", "content_args": {"strip": False}, "repeats": True}


def published_format(template: Mapping[str, Any], tools: ToolFormat | None) -> MessageFormat:
    """The format of a tokenizer's response template. tools: how calls are forced. Raises ValueError for one that is
    invalid."""
    loaded = load_response_template(dict(template))
    found = next((loaded.fields[name] for name in REASONING_FIELDS if name in loaded.fields), None)
    reasoning = None
    if found is not None and found.open_literals and found.close_literals:
        reasoning = ReasoningFormat(found.open_literals[0], found.close_literals[0])
    return MessageFormat(reasoning, tools, loaded.start_anchor_re.pattern, dict(template))


def _published_region(template: Mapping[str, Any]) -> CallRegion | None:
    if CALLS not in template["fields"]:
        return None
    region, field = template["fields"][CALLS], load_response_template(dict(template)).fields[CALLS]

    def read(found: Mapping[str, str], parameters: Mapping[str, Any]) -> list[Named]:
        try:
            begins = field.open_re.match(found["opening"])
            value = process_field(found["body"], field, begins.groupdict() if begins else {})
            functions = [one["function"] for one in (value if isinstance(value, list) else [value])]
            names = [str(one["name"]) for one in functions]
            given = [_arguments(one.get("arguments"), parameters.get(one["name"])) for one in functions]
            return list(zip(names, given, strict=True))
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("the response template does not make a call of it") from error

    ends = {key: region[key] for key in ("close", "close_pattern") if key in region}
    return CallRegion(field.open_re.pattern, ends, read, field.close_literals[0] if field.close_literals else "")


def _arguments(value: Any, schema: Any) -> str:
    if not isinstance(value, dict):
        return value if isinstance(value, str) else "{}"
    schemas = schema.get("properties") if isinstance(schema, dict) else None
    given = {
        key: typed(one, (schemas or {}).get(key, {"type": "string"}), schema) if isinstance(one, str) else one
        for key, one in value.items()
    }
    return json.dumps(given, ensure_ascii=False, allow_nan=False)
