"""POST /v1/responses: the Response object, and the events that build it. Each block of the message is an item of the
output."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.server.chunk import Chunk
from stridelm.server.errors import ApiError, bad_request
from stridelm.server.large import LargeBodies
from stridelm.server.message_answer import Event, MessageAnswer, drafted, encoded
from stridelm.server.messages import Finish
from stridelm.server.openai.chat import prepare, scored
from stridelm.server.openai.shared import ONLY_TIER, reply
from stridelm.server.openai.tools import MessageReading
from stridelm.server.responses.schemas import ResponsesRequest
from stridelm.server.service import Service

router = APIRouter(route_class=LargeBodies)

PREFIXES = {"reasoning": "rs", "content": "msg", "call": "fc"}
TEXTS = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}
"""Kind of block -> the prefix of its ids; the name of the events with its text."""
NULLS = ("error", "incomplete_details", "instructions", "max_tool_calls", "previous_response_id", "usage")
ALWAYS = {"object": "response", "truncation": "disabled", "background": False, "store": False}
REPEATED = {
    *("max_output_tokens", "parallel_tool_calls", "prompt_cache_key", "reasoning", "safety_identifier", "text"),
    *("top_logprobs", "user"),
}
STATUSES = {"stop": ("completed", "completed"), "length": ("incomplete", "incomplete")}
"""By the reason why the output ended: the response's status, and the event that has it."""
MESSAGE = {"type": "message", "role": "assistant"}


@router.post("/v1/responses", response_model=None)
async def respond(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, as OpenAI's Responses API does. Nothing is stored."""
    chat = body.as_chat()
    reading = await prepare(chat, request)
    if chat.logprobs and reading.parser is not None:
        why = "log-probabilities are of messages that can have neither calls nor reasoning; use /v1/chat/completions"
        raise bad_request(f"include: {why}", "include")
    return await reply(request, [reading.prompt], ResponseAnswer(request.app.state.service, body, reading), body.stream)


class ResponseAnswer(MessageAnswer):
    def __init__(self, service: Service, body: ResponsesRequest, reading: MessageReading) -> None:
        super().__init__(service, reading)
        self._top = body.top_logprobs
        self._heading = self._repeated(body) | {"model": service.names[0]}
        self._numbered, self._id = 0, ""
        """Events so far, and the id of the open item."""
        self._scores, self._untold = list[msgspec.Raw](), list[msgspec.Raw]()
        """Log-probabilities of the open item, and those that no event has had yet."""

    def opening(self) -> bytes:
        begun = self._response("in_progress")
        return encoded([self._event(what, response=begun) for what in ("created", "in_progress")])

    def take(self, chunk: Chunk) -> list[Event]:
        self._untold += scored(chunk, self._top, self.service.tokenizer)
        return super().take(chunk)

    def begin(self) -> list[Event]:
        self._id, self._scores = f"{PREFIXES[self.kind]}_{secrets.token_hex(24)}", []
        item = self._item("in_progress", "", [])
        added = self._event("output_item.added", output_index=len(self.blocks), item=item)
        return [added] if self.kind == "call" else [added, self._within("content_part.added", part=self._part(""))]

    def more(self, text: str) -> Event:
        new, self._untold = self._untold, []
        self._scores += new
        return self._within(f"{TEXTS[self.kind]}.delta", delta=text, **self._scored(new))

    def end(self, text: str, cut: bool) -> list[Event]:
        part = self._part(text)
        item = self._item("incomplete" if cut else "completed", text, [part])
        if self.kind == "call":
            ended = [self._within("function_call_arguments.done", name=self.call.name, arguments=text)]
        else:
            ended = [self._within(f"{TEXTS[self.kind]}.done", text=text, **self._scored(self._scores))]
            ended.append(self._within("content_part.done", part=part))
        ended.append(self._event("output_item.done", output_index=len(self.blocks), item=item))
        self.blocks.append(item)
        return ended

    def finish(self, finish: Finish) -> list[Event]:
        status, what = STATUSES.get(finish.reason, ("cancelled", "incomplete"))
        usage = {
            "input_tokens": self.usage.prompt,
            "input_tokens_details": {"cached_tokens": self.usage.cached, "cache_write_tokens": 0},
            "output_tokens": self.usage.completion,
            "output_tokens_details": {"reasoning_tokens": self.usage.reasoning},
            "total_tokens": self.usage.prompt + self.usage.completion,
        }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        self.message = self._response(status, usage=usage, incomplete_details=why, **drafted(finish))
        return [self._event(what, response=self.message)]

    def failed(self, error: ApiError) -> bytes:
        what = error.body["error"]
        why = {"code": what["code"] or "server_error", "message": what["message"]}
        return encoded([self._event("failed", response=self._response("failed", error=why))])

    def _scored(self, scores: list[msgspec.Raw]) -> dict[str, Any]:
        return {"logprobs": scores} if self.kind == "content" else {}

    def _item(self, status: str, text: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id, "status": status}
        if self.kind == "call":
            call = {"call_id": self.call.id, "name": self.call.name, "arguments": text}
            return {**item, "type": "function_call", **call}
        thought = {"type": "reasoning", "summary": []}
        return {**item, **(thought if self.kind == "reasoning" else MESSAGE), "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        part = {"type": TEXTS[self.kind], "text": text}
        return part | ({"annotations": [], "logprobs": list(self._scores)} if self.kind == "content" else {})

    def _within(self, what: str, **fields: Any) -> Event:
        place = {} if self.kind == "call" else {"content_index": 0}
        return self._event(what, item_id=self._id, output_index=len(self.blocks), **place, **fields)

    def _event(self, what: str, **fields: Any) -> Event:
        self._numbered += 1
        return {"type": f"response.{what}", "sequence_number": self._numbered - 1, **fields}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return {**self._heading, "status": status, "output": list(self.blocks), **more}

    def _repeated(self, body: ResponsesRequest) -> dict[str, Any]:
        """What is said of the request, but not its instructions and descriptions, which may be long."""
        tools = [
            {name: tool.get(name) for name in ("type", "name", "parameters", "strict")} for tool in body.tools or ()
        ]
        fields = dict.fromkeys(NULLS) | ALWAYS | body.model_dump(include=REPEATED)
        fields |= {"id": f"resp_{secrets.token_hex(24)}", "created_at": int(time.time()), "service_tier": ONLY_TIER}
        fields |= {"temperature": self.params.temperature, "top_p": self.params.top_p, "metadata": body.metadata or {}}
        return fields | {"tools": tools, "tool_choice": body.tool_choice}
