"""The structure of a message in which calls are forced, or strict, or which answers in JSON after its reasoning: as a
structural tag, in the model's own format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stridelm.chat.arguments import Format
from stridelm.chat.formats import ReasoningFormat, ToolFormat
from stridelm.chat.message_format import MessageFormat

NOT_A_CALL = {"type": "regex", "pattern": r"(?:[^\s\[{<][\s\S]*)?"}
"""Text that does not begin like a call that is one only at the start of a message."""


@dataclass(frozen=True)
class Wanted:
    """What a request asks of a message. tools: in OpenAI's form, those that may be called. parallel: there may be
    several calls. answer: the structure of its content (SamplingParams.structured_outputs)."""

    tools: Sequence[Mapping[str, Any]] = ()
    choice: Literal["auto", "required"] = "auto"
    parallel: bool = True
    answer: Mapping[str, Any] | None = None

    @property
    def strict(self) -> bool:
        """Whether calls are bound to their schemas although none need be made."""
        return not self.parallel or any(tool["function"].get("strict") for tool in self.tools)


def structure(form: MessageFormat, opened: str, wanted: Wanted) -> dict[str, Any] | None:
    """The structured_outputs of a message; None if it is free. opened: what the prompt has of it.

    Raises ValueError for tools that cannot be forced in this format, and for a structure that would have no effect.
    """
    state = _reasoning_state(form.reasoning, opened)
    tools = wanted.tools
    if wanted.choice == "required":
        if wanted.answer is not None:
            raise ValueError("a tool must be called, so the structure of an answer would have no effect; leave it out")
        body: list[Format] = _calls(_known(form), tools, wanted.parallel)
    elif wanted.answer is not None:
        answer = _answer(wanted.answer)
        body = [answer]
        if tools:
            calls = _sequence(_calls(_known(form), tools, wanted.parallel))
            body = [{"type": "or", "elements": [calls, answer]}]
        elif state in ("none", "closed"):
            return dict(wanted.answer)
    elif tools and wanted.strict:
        body = _optional_calls(_known(form), tools, wanted.parallel)
    else:
        return None
    reasoning = _reasoning(form.reasoning, state) if form.reasoning is not None else []
    return {"structural_tag": json.dumps({"format": _sequence([*reasoning, *body])}, ensure_ascii=False)}


def _known(form: MessageFormat) -> ToolFormat:
    if form.tools is None:
        raise ValueError("the model's format of tool calls is not known: start the server with --tool-call-parser")
    return form.tools


def _reasoning_state(form: ReasoningFormat | None, opened: str) -> Literal["none", "open", "closed", "free"]:
    """Whether a prompt has begun the reasoning, or ended it, or left it to the model."""
    if form is None:
        return "none"
    begun, ended = opened.rfind(form.open.strip()), opened.rfind(form.close)
    if begun > ended or (form.implied and ended < 0):
        return "open"
    return "closed" if ended >= 0 else "free"


def _reasoning(form: ReasoningFormat, state: str) -> list[Format]:
    """Reasoning before the rest of the message."""
    if state == "closed":
        return []
    free: Format = {"type": "any_text"}
    begin = form.open if state == "free" else ""
    whole: list[Format] = [{"type": "tag", "begin": begin, "content": free, "end": form.close}]
    whole += [_const(form.after)] if form.after else []
    return whole if state == "open" else [{"type": "optional", "content": _sequence(whole)}]


def _calls(form: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool) -> list[Format]:
    """One call or more."""
    one: Format = {"type": "or", "elements": [_call(form, tool["function"]) for tool in tools]}
    several: list[Format] = []
    if parallel and not form.single:
        following = _sequence([*([_const(form.between)] if form.between else []), one])
        several = [{"type": "star", "content": following}]
    begin, end = form.section
    return [*([_const(begin)] if begin else []), one, *several, *([_const(end)] if end else [])]


def _call(form: ToolFormat, function: Mapping[str, Any]) -> Format:
    name = str(function["name"])
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    try:
        body = form.body.forced(schema)
    except ValueError as error:
        raise ValueError(f"tool {name!r}: {error}") from error
    before, index, after = form.begin.replace("{name}", name).partition("{index}")
    begin = [_const(before), *([{"type": "regex", "pattern": "[0-9]{1,3}"}, _const(after)] if index else [])]
    return _sequence([*begin, *body, *([_const(form.end)] if form.end else [])])


def _optional_calls(form: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool) -> list[Format]:
    """Text, with calls that are bound to their schemas."""
    if form.at_start:
        return [{"type": "or", "elements": [_sequence(_calls(form, tools, parallel)), NOT_A_CALL]}]
    begin, end = form.section
    mark = (begin or form.begin.partition("{name}")[0]).strip()
    trigger = mark[: mark.index(">") + 1] if ">" in mark else mark.partition("]")[0] + "]"
    if begin:
        [_, *inner] = _calls(form, tools, parallel)
        tags = [{"type": "tag", "begin": begin, "content": _sequence(inner[:-1]), "end": end}]
    else:
        tags = [_tag(form, tool["function"]) for tool in tools]
    return [{"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not parallel}]


def _tag(form: ToolFormat, function: Mapping[str, Any]) -> Format:
    elements = list(_call(form, function)["elements"])
    begin, end = "", elements.pop()["value"] if form.end else ""
    while elements and elements[0]["type"] == "const_string":
        begin += elements.pop(0)["value"]
    return {"type": "tag", "begin": begin, "content": _sequence(elements or [_const("")]), "end": end}


def _answer(given: Mapping[str, Any]) -> Format:
    """The structure of an answer as a part of another."""
    [(kind, value)] = given.items()
    if kind == "structural_tag":
        value = json.loads(value) if isinstance(value, str) else value
        return dict(value["format"])
    if kind == "choice":
        return {"type": "or", "elements": [_const(word) for word in value]}
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else value
        return {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}
    return {"type": kind, "pattern" if kind == "regex" else "grammar": value}


def _const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(elements: Sequence[Format]) -> Format:
    return {"type": "sequence", "elements": list(elements)}
