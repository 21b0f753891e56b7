"""What a chat template does with a conversation in OpenAI's form, found out by rendering small ones.

Templates are programs, and no two agree on the form of a message: arguments as an object or as text, content as text or
as parts, null or empty content beside calls, a system role or a developer's. Each question is settled by what comes
out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

from stridelm.chat.parts import mistral_id
from stridelm.text.tokenizer import Tokenizer

Message = dict[str, Any]
MARK = "zq7"
"""A text that no template has."""
LONG_ID, SHORT_ID = "call_0123456789abcdef", "a1b2c3d4e"


@dataclass(frozen=True)
class TemplateHabits:
    """A template's needs and habits.

    reads_tools, writes_calls: descriptions of tools, or calls, are in what it writes.
    parts: content must be a list of parts.
    text_arguments: a call's arguments must be text, not an object.
    null_content: a message that has only calls must have null content, not an empty text.
    short_ids: ids of calls must have nine letters and digits.
    developer: it knows the developer's role.
    opening: what it writes to open the model's message.
    """

    reads_tools: bool
    parts: bool
    writes_calls: bool
    text_arguments: bool
    null_content: bool
    short_ids: bool
    developer: bool
    opening: str

    def messages(self, given: Iterable[Mapping[str, Any]]) -> list[Message]:
        """Messages of OpenAI's form as the template needs them. Text beside calls is a message of its own where the
        template has only one of the two. Raises ValueError for parts that are not text, and for calls that the template
        does not know."""
        messages = []
        for one in given:
            if self.null_content and one.get("tool_calls") and one.get("content"):
                messages.append(self._message({**one, "tool_calls": None}))
            messages.append(self._message(one))
        return messages

    def _message(self, given: Mapping[str, Any]) -> Message:
        message = {key: value for key, value in given.items() if value is not None}
        message["content"] = self._content(given.get("content"))
        if message.get("role") == "developer" and not self.developer:
            message["role"] = "system"
        if "reasoning" in message:
            message.setdefault("reasoning_content", message["reasoning"])
        calls = message.pop("tool_calls", None)
        if calls:
            if not self.writes_calls:
                raise ValueError("the model's chat template has no tool calls; leave tool_calls out")
            if not isinstance(calls, list):
                raise ValueError("tool_calls must be a list")
            message["tool_calls"] = [self._call(call) for call in calls]
            if self.null_content:
                message["content"] = None
        if self.short_ids and "tool_call_id" in message:
            message["tool_call_id"] = mistral_id(str(message["tool_call_id"]))
        return message

    def _content(self, content: Any) -> Any:
        texts = [content or ""] if not isinstance(content, list) else [_text(part) for part in content]
        if self.parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _call(self, given: Any) -> Message:
        if not isinstance(given, dict) or not isinstance(given.get("function"), dict):
            raise ValueError("a tool call must be an object with a function: give its name and arguments")
        function = dict(given["function"])
        arguments = function.get("arguments")
        function["arguments"] = _as_text(arguments) if self.text_arguments else _as_object(arguments)
        call = {"type": "function", **given, "function": function}
        if self.short_ids and "id" in call:
            call["id"] = mistral_id(str(call["id"]))
        return call


_FOUND: WeakKeyDictionary[Tokenizer, tuple[str, TemplateHabits]] = WeakKeyDictionary()


def habits_of(tokenizer: Tokenizer, template: str | None = None) -> TemplateHabits:
    """What a chat template does, by default the tokenizer's; found out once, in some hundredths of a second."""
    source = template or str(tokenizer.hf.chat_template or "")
    known = _FOUND.get(tokenizer)
    if known is None or known[0] != source:
        _FOUND[tokenizer] = known = (source, _habits(tokenizer, source))
    return known[1]


def _habits(tokenizer: Tokenizer, source: str) -> TemplateHabits:
    def written(messages: Sequence[Message], **options: Any) -> str | None:
        try:
            return tokenizer.render_chat(messages, template=source or None, **options)
        except ValueError:
            return None

    def shows(content: Any) -> bool:
        text = written([{"role": "user", "content": content}]) or ""
        return MARK in text and "'text'" not in text and '"text"' not in text

    def content(text: str) -> Any:
        return [{"type": "text", "text": text}] if parts else text

    def writes_call(short_id: bool, text_arguments: bool, null_content: bool) -> bool:
        """The template writes the call's name, and its argument as JSON or plain, not as Python or quoted text."""
        id, value = SHORT_ID if short_id else LONG_ID, {"key": MARK}
        function = {"name": "fn", "arguments": json.dumps(value) if text_arguments else value}
        calls = [{"id": id, "type": "function", "function": function}]
        asked = {"role": "assistant", "content": None if null_content else content(""), "tool_calls": calls}
        answer = {"role": "tool", "tool_call_id": id, "name": "fn", "content": content("found")}
        text = written([question, asked, answer]) or ""
        return "fn" in text and MARK in text and f"'{MARK}'" not in text and f'\\"{MARK}' not in text

    parts = not shows(MARK) and shows([{"type": "text", "text": MARK}])
    question = {"role": "user", "content": content("a question")}
    form = next((form for form in product((False, True), repeat=3) if writes_call(*form)), None)
    short_ids, text_arguments, null_content = form or (False, False, False)
    tool = {"type": "function", "function": {"name": MARK, "description": "x", "parameters": {"type": "object"}}}
    closed, opened = written([question], add_generation_prompt=False), written([question])
    opens = opened is not None and closed is not None and opened.startswith(closed)
    return TemplateHabits(
        reads_tools=MARK in (written([question], tools=[tool]) or ""),
        parts=parts,
        writes_calls=form is not None,
        text_arguments=text_arguments,
        null_content=null_content,
        short_ids=short_ids,
        developer="developer" in source,
        opening=str(opened).removeprefix(str(closed)) if opens else "",
    )


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if isinstance(text, str):
            return text
    kind = str(part.get("type"))[:64] if isinstance(part, dict) else "no object"
    raise ValueError(f"this model reads only text; leave out parts of other types ({kind})")


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    with suppress(ValueError, RecursionError):
        value = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        if isinstance(value, dict) or arguments is None:
            return value or {}
    raise ValueError("a tool call's arguments must be a JSON object, as text")
