"""POST /v1/messages and what is beside it: the Message object, and the events that build it."""

from __future__ import annotations

import json
import secrets
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.server.anthropic.schemas import CountRequest, MessagesRequest
from stridelm.server.chunk import Chunk
from stridelm.server.errors import MESSAGES, ApiError
from stridelm.server.large import LargeBodies, answered
from stridelm.server.message_answer import Event, MessageAnswer, drafted, encoded
from stridelm.server.messages import Finish
from stridelm.server.openai.chat import prepare
from stridelm.server.openai.conversation import conversation_text
from stridelm.server.openai.render import rendered
from stridelm.server.openai.shared import check_model, reply
from stridelm.server.openai.tools import MessageReading
from stridelm.server.prompts import PromptReader
from stridelm.server.replies import PartsReply
from stridelm.server.service import Service

router = APIRouter(route_class=LargeBodies)

DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kind of block -> the type of its deltas, and the field of their text."""


@router.post(MESSAGES, response_model=None)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    reading = await prepare(body.as_chat(), request)
    answer = AnthropicAnswer(request.app.state.service, body, reading)
    return await reply(request, [reading.prompt], answer, body.stream)


@router.post(f"{MESSAGES}/render", response_model=None)
async def render(body: MessagesRequest, request: Request) -> Response:
    """What /v1/chat/completions/render answers for the same conversation."""
    reading = await prepare(body.as_chat(), request)
    return PartsReply(await rendered(body, request, [reading.prompt]))


@router.post(f"{MESSAGES}/count_tokens", response_model=None)
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """The number of tokens that a conversation has as a prompt."""
    check_model(request.app.state.service, body.model)
    return await answered(request, body, counted)


def counted(body: CountRequest, reader: PromptReader) -> dict[str, Any]:
    """The answer to count_tokens. Raises ApiError for a conversation that the chat template refuses."""
    text = conversation_text(body.as_chat(), reader.tokenizer)
    [ids] = reader.without_limit().read([text], False, "messages")
    return {"input_tokens": len(ids)}


class AnthropicAnswer(MessageAnswer):
    def __init__(self, service: Service, body: MessagesRequest, reading: MessageReading) -> None:
        thinking = body.thinking
        super().__init__(service, reading, reasoning=thinking is None or thinking.display != "omitted")
        self._id, self._model = f"msg_{secrets.token_hex(12)}", service.names[0]
        self._begun = False

    def take(self, chunk: Chunk) -> list[Event]:
        """The first event has usage, which is known when the first output arrives."""
        events = super().take(chunk)
        if self._begun:
            return events
        self._begun = True
        begun = self._message([], stop_reason=None, stop_sequence=None, usage={**self._usage(), "output_tokens": 0})
        return [{"type": "message_start", "message": begun}, {"type": "ping"}, *events]

    def begin(self) -> list[Event]:
        return [{"type": "content_block_start", "index": len(self.blocks), "content_block": self._block("")}]

    def more(self, text: str) -> Event:
        kind, field = DELTAS[self.kind]
        return self._delta(kind, text, field)

    def end(self, text: str, cut: bool) -> list[Event]:
        ended = {"type": "content_block_stop", "index": len(self.blocks)}
        # some clients send thinking back only if it has been signed
        signed = [self._delta("signature_delta", "", "signature")] if self.kind == "reasoning" else []
        self.blocks.append(self._block(text))
        return [*signed, ended]

    def finish(self, finish: Finish) -> list[Event]:
        stopped = finish.stop_reason if isinstance(finish.stop_reason, str) else None
        ended = {"stop_reason": self._reason(finish), "stop_sequence": stopped}
        self.message = self._message(self.blocks, **ended, usage=self._usage(), **drafted(finish))
        delta = {"type": "message_delta", "delta": ended, "usage": self._usage(), **drafted(finish)}
        return [delta, {"type": "message_stop"}]

    def failed(self, error: ApiError) -> bytes:
        return encoded([error.body_at(MESSAGES)])

    def _block(self, text: str) -> dict[str, Any]:
        if self.kind == "call":
            return {"type": "tool_use", "id": self.call.id, "name": self.call.name, "input": json.loads(text or "{}")}
        if self.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text}

    def _delta(self, kind: str, text: str, field: str) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": {"type": kind, field: text}}

    def _reason(self, finish: Finish) -> str:
        if finish.reason == "stop":
            if isinstance(finish.stop_reason, str):
                return "stop_sequence"
            return "tool_use" if self.parser is not None and self.parser.calls else "end_turn"
        full = finish.reason == "length" and self.usage.completion < (self.params.max_tokens or self.usage.completion)
        return "model_context_window_exceeded" if full else "max_tokens"

    def _usage(self) -> dict[str, Any]:
        """Unlike in OpenAI's APIs, cached tokens are counted apart from input_tokens."""
        return {
            "input_tokens": self.usage.prompt - self.usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.usage.cached,
            "output_tokens": self.usage.completion,
            "output_tokens_details": {"thinking_tokens": self.usage.reasoning},
        }

    def _message(self, content: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        heading = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**heading, "content": content, **more}
