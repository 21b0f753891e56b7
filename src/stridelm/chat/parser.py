"""Finds reasoning, content and tool calls in a message as it arrives.

What is found does not depend on how the text is cut. Nothing is lost: a call that is not complete or cannot be read is
content, as the model wrote it. White space is dropped only beside reasoning and calls.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformers.utils.chat_parsing.response_parser import ResponseParser

from stridelm.chat.message_format import CALLS, MARK, MessageFormat
from stridelm.chat.parts import Part, Text, ToolCall, call_id

MARK_BEGINS = re.compile(r"[<\[{]")
"""Characters that begin every mark of the formats here."""


NOT_YET = 0.5
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a call may raise: the text is the model's."""


class MessageParser:
    """Of one message."""

    def __init__(
        self,
        form: MessageFormat,
        opened: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning: bool = True,
    ) -> None:
        """opened: what the prompt has of the message already (ModelChat.opened). tools: as in OpenAI's API; without
        them calls stay text. reasoning: False to leave that in the content."""
        self.reasoning_tokens = 0
        """Tokens of the reasoning, with its marks. A token that also has other text is not counted."""
        self.calls = 0
        """Calls found so far."""
        self.finds_reasoning = reasoning and form.reasoning is not None
        """Whether reasoning is told from content."""
        self._form = form
        functions = [tool["function"] for tool in tools or ()]
        self._parameters = {one["name"]: one.get("parameters") or {} for one in functions}
        self._template = form.templates[bool(tools), reasoning]
        self._found: list[Part] = []
        """Parts that are found and not returned yet."""
        self._ends: deque[float] = deque()
        """Where tokens end that are not counted yet. One without text belongs to the text after it."""
        self._length = 0
        self._at = 0.0
        """Characters received, and those of them that are known to be this or that."""
        self._field: Literal["reasoning", "content"] = "content"
        self._spaces: dict[str, str] = {"reasoning": "", "content": ""}
        """White space that is dropped if what follows is a mark."""
        self._fresh = False
        """Whether a mark stands before what follows."""
        self._has_content = False
        self._settled = False
        """Nothing is held back: what follows is text until a mark begins."""
        self._quiet = form.published is None
        self._in_call = self._as_text = False
        """The region of a call is content: a call may not stand here."""
        self._implied = self._waiting = ""
        """The mark of reasoning that nobody need write, and text that may be its beginning."""
        if form.reasoning is not None and self.finds_reasoning and form.reasoning.implied and not opened.strip():
            self._implied = form.reasoning.open
        self._begin(opened)

    def _begin(self, opened: str) -> None:
        self._parser = ResponseParser(self._template, prefix=opened)
        self._at = -math.inf  # what the prompt has is not counted
        self._take(self._parser.initial_events)
        self._found.clear()
        self._at = self.calls = 0
        self._spaces, self._fresh = {"reasoning": "", "content": ""}, self._field == "reasoning"

    def feed(self, pieces: Sequence[str]) -> list[Part]:
        """More of the message: the text of each token. Returns what is known now."""
        for piece in pieces:
            self._length += len(piece)
            self._ends.append(self._length if piece else self._length + NOT_YET)
        text = "".join(pieces)
        if not text or (self._implied and not (text := self._opening(text))):
            return []
        if self._settled and self._quiet and not MARK_BEGINS.search(text):
            self._text(self._field, text)
        else:
            self._take(self._parser.feed(text))
            self._settled = self._at == self._length and not self._in_call
        return self._taken()

    def finish(self) -> list[Part]:
        """What remains when nothing more will come."""
        if self._implied:
            text = self._opening("", at_end=True)
            self._take(self._parser.feed(text))
        _, events = self._parser.finalize()
        self._take(events, at_end=True)
        self._at += 1  # for tokens without text at the end
        self._count(reasoning=self._field == "reasoning")
        rest = self._spaces[self._field]
        if rest and not (self._fresh and self._field == "content"):
            self._add(self._field, rest)
        return self._taken()

    def _taken(self) -> list[Part]:
        found, self._found = self._found, []
        return found

    def _opening(self, text: str, at_end: bool = False) -> str:
        """The message's first text, once it is known whether it has the mark of reasoning, which has begun in any
        case."""
        self._waiting += text
        bare = self._waiting.lstrip()
        if not at_end and self._implied.startswith(bare) and bare != self._implied:
            return ""
        if not bare.startswith(self._implied):
            self._begin(self._implied)
        self._implied = ""
        return self._waiting

    def _take(self, events: Sequence[Mapping[str, Any]], at_end: bool = False) -> None:
        for event in events:
            kind, field = event["type"], event["field"]
            if field == CALLS:
                self._call(kind, event, at_end)
            elif field.startswith(MARK):
                if kind == "region_open":
                    self._at += len(field) - len(MARK)
                    self._count(reasoning=False)
                else:
                    self._spaces["content"], self._fresh = "", True
            elif kind == "region_chunk":
                self._text(field, event["text"])
            elif field == "reasoning":
                self._switch(kind, at_end)

    def _switch(self, kind: str, at_end: bool) -> None:
        """Reasoning begins or ends."""
        form = self._form.reasoning
        assert form is not None
        if kind == "region_close" and at_end:
            return
        self._at += len(form.open if kind == "region_open" else form.close)
        self._count(reasoning=True)
        self._spaces[self._field] = ""
        self._field = "reasoning" if kind == "region_open" else "content"
        self._fresh = True

    def _text(self, field: Literal["reasoning", "content"], text: str) -> None:
        self._at += len(text)
        self._count(reasoning=field == "reasoning")
        text = self._spaces[field] + text
        if self._fresh:
            text = text.lstrip()
        shown = text.rstrip()
        self._spaces[field] = text[len(shown) :]
        if shown:
            self._fresh = False
            self._has_content |= field == "content"
            self._add(field, shown)

    def _add(self, field: Literal["reasoning", "content"], text: str) -> None:
        """Neighbouring texts of one field are one part."""
        last = self._found[-1] if self._found else None
        if isinstance(last, Text) and last.field == field:
            self._found[-1] = Text(field, last.text + text)
        else:
            self._found.append(Text(field, text))

    def _call(self, kind: str, event: Mapping[str, Any], at_end: bool) -> None:
        region = self._form.call_region
        assert region is not None
        self._in_call = kind != "region_close"
        if kind == "region_open":
            self._as_text = region.at_start and self._has_content
        elif kind == "region_chunk":
            if self._as_text:
                self._text("content", event["text"])
            else:
                self._at += len(event["text"])
        elif not self._as_text:
            opening, body = event["value"]["opening"], event["value"]["body"]
            closing = "" if at_end else region.closing
            self._at += len(opening) + len(closing)
            self._count(reasoning=False)
            try:
                if at_end and region.closing:
                    raise ValueError("it is not complete")
                calls = region.read(event["value"], self._parameters)
                for name, arguments in calls:
                    arguments.encode()  # refuses lone surrogates
                    if not name or (region.at_start and name not in self._parameters):
                        raise ValueError("it is not a call of a function")
            except UNREADABLE:
                self._at -= len(opening + body + closing)  # as text it is counted again
                self._text("content", opening + body + closing)
                return
            self._spaces["content"], self._fresh = "", True
            for name, arguments in calls:
                self._found.append(ToolCall(self.calls, call_id(region.id_style, name, self.calls), name, arguments))
                self.calls += 1

    def _count(self, reasoning: bool) -> None:
        """Tokens up to here belong to what was just read."""
        while self._ends and self._ends[0] <= self._at:
            self._ends.popleft()
            self.reasoning_tokens += reasoning
