"""The structure of a message in which calls are forced, or strict, or which answers in JSON after its reasoning: as a
structural tag, in the model's own format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any, Literal

from stridelm.chat.forced_values import Format, at_root, const, either, optional, sequence
from stridelm.chat.formats import ReasoningFormat, ToolFormat
from stridelm.chat.message_format import MessageFormat

NOT_A_CALL = {"type": "regex", "pattern": r"(?:[^\s\[{<][\s\S]*)?"}
"""Text that does not begin like a call that is one only at the start of a message."""


@dataclass(frozen=True)
class Wanted:
    """A request's demands on a message. tools: in OpenAI's form, those that may be called. parallel: there may be
    several calls. answer: the structure of its content (SamplingParams.structured_outputs)."""

    tools: Sequence[Mapping[str, Any]] = ()
    choice: Literal["auto", "required"] = "auto"
    parallel: bool = True
    only: bool = False
    answer: Mapping[str, Any] | None = None

    @property
    def strict(self) -> bool:
        """Whether the grammar holds calls to their schemas even if none is required."""
        return self.only or not self.parallel or any(tool["function"].get("strict") for tool in self.tools)


def structure(form: MessageFormat, opened: str, wanted: Wanted) -> dict[str, Any] | None:
    """The structured_outputs of a message; None if it is free. opened: what the prompt has of it.

    Raises ValueError for tools that cannot be forced in this format, and for a structure that would have no effect.
    """
    reasoning, tools = _reasoning(form.reasoning, opened), wanted.tools
    if wanted.choice == "required":
        if wanted.answer is not None:
            raise ValueError("a tool must be called, so the structure of an answer would have no effect; leave it out")
        body: list[Format] = _calls(_known(form), tools, wanted.parallel)
    elif wanted.answer is not None:
        answer = _answer(wanted.answer)
        body = [answer]
        if tools:
            calls = sequence(_calls(_known(form), tools, wanted.parallel))
            body = [either([calls, answer])]
        elif not reasoning:
            return dict(wanted.answer)
    elif tools and wanted.strict:
        body = _optional_calls(_known(form), tools, wanted.parallel)
    else:
        return None
    return {"structural_tag": json.dumps({"format": sequence([*reasoning, *body])}, ensure_ascii=False)}


def _known(form: MessageFormat) -> ToolFormat:
    if form.tools is None:
        raise ValueError("the model's format of tool calls is not known: start the server with --tool-call-parser")
    return form.tools


def _reasoning(form: ReasoningFormat | None, opened: str) -> list[Format]:
    """Reasoning before the rest of the message, which the prompt has begun, or ended, or left to the model."""
    if form is None:
        return []
    begun, ended = opened.rfind(form.open.strip()), opened.rfind(form.close)
    is_open = begun > ended or (form.implied and ended < 0)
    if ended >= 0 and not is_open:
        return []
    begin = "" if is_open else form.open
    whole: list[Format] = [{"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": form.close}]
    whole += [const(form.after)] if form.after else []
    return whole if is_open else [optional(whole)]


def _calls(form: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool) -> list[Format]:
    """One call or more."""
    one: Format = either([_call(form, tool["function"]) for tool in tools])
    several: list[Format] = []
    if parallel and not form.single:
        following = sequence([*([const(form.between)] if form.between else []), one])
        several = [{"type": "star", "content": following}]
    begin, end = form.section
    return [*([const(begin)] if begin else []), one, *several, *([const(end)] if end else [])]


def _call(form: ToolFormat, function: Mapping[str, Any]) -> Format:
    name = str(function["name"])
    if not re.fullmatch(form.names, name, re.ASCII) or (form.at_start and iskeyword(name)):
        raise ValueError(f"tool {name!r}: a call in this model's format could not be told from its name; rename it")
    try:
        body = form.body.forced(at_root(function.get("parameters") or {"type": "object", "properties": {}}))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        why = error if type(error) is ValueError else "its parameters are not a JSON schema"
        raise ValueError(f"tool {name!r}: {why}") from error
    begin, index, after = form.begin.replace("{name}", name).partition("{index}")
    content = [{"type": "regex", "pattern": "[0-9]{1,3}"}, const(after), *body] if index else body
    while content and content[0]["type"] == "const_string":  # tells a name from one that begins with it
        begin += content.pop(0)["value"]
    return {"type": "tag", "begin": begin, "content": sequence(content or [const("")]), "end": form.end}


def _optional_calls(form: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool) -> list[Format]:
    """Text, with calls that are bound to their schemas."""
    if form.at_start:
        return [either([sequence(_calls(form, tools, parallel)), NOT_A_CALL])]
    begin, end = form.section
    mark = (begin or form.begin.partition("{name}")[0]).strip()
    trigger = mark[: mark.index(">") + 1] if ">" in mark else mark.partition("]")[0] + "]"
    if begin:
        [_, *inner] = _calls(form, tools, parallel)
        tags = [{"type": "tag", "begin": begin, "content": sequence(inner[:-1]), "end": end}]
    else:
        tags = [_call(form, tool["function"]) for tool in tools]
    return [{"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not parallel}]


def _answer(given: Mapping[str, Any]) -> Format:
    """The structure of an answer as a part of another."""
    [(kind, value)] = given.items()
    if kind == "structural_tag":
        value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, dict) or not isinstance(value.get("format"), dict):
            raise ValueError("a structural tag beside tools or reasoning must have a format")
        return dict(value["format"])
    if kind == "choice":
        return either([const(word) for word in value])
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else value
        return {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}
    return {"type": kind, "pattern" if kind == "regex" else "grammar": value}
