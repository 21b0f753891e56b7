"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.server.anthropic.answer import AnthropicAnswer
from stridelm.server.anthropic.schemas import CountRequest, MessagesRequest
from stridelm.server.callers import caller_of
from stridelm.server.errors import MESSAGES as ROUTE
from stridelm.server.large import LargeBodies, reply_read
from stridelm.server.openai.chat import prepare
from stridelm.server.openai.conversation import conversation_text
from stridelm.server.openai.render import rendered
from stridelm.server.openai.shared import check_model, reply
from stridelm.server.prompts import PromptReader
from stridelm.server.replies import PartsReply, raw_json_reply, to_json, while_connected
from stridelm.server.service import Service

router = APIRouter(route_class=LargeBodies)


@router.post(ROUTE, response_model=None)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    reading = await prepare(body.as_chat(), request)
    answer = AnthropicAnswer(request.app.state.service, body, reading)
    return await reply(request, [reading.prompt], answer, body.stream)


@router.post(f"{ROUTE}/render", response_model=None)
async def render(body: MessagesRequest, request: Request) -> Response:
    """What /v1/chat/completions/render answers for the same conversation."""
    reading = await prepare(body.as_chat(), request)
    return PartsReply(await rendered(body, request, [reading.prompt]))


@router.post(f"{ROUTE}/count_tokens", response_model=None)
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """The number of tokens that a conversation has as a prompt."""
    service: Service = request.app.state.service
    check_model(service, body.model)
    counts = reply_read(request)
    if counts is None:
        counting = service.beside(caller_of(request), lambda _: to_json(counted(body, service.reader)))
        counts = await while_connected(request, counting)
    return raw_json_reply(counts)


def counted(body: CountRequest, reader: PromptReader) -> dict[str, Any]:
    """The answer to count_tokens. Raises ApiError for a conversation that the chat template refuses."""
    text = conversation_text(body.as_chat(), reader.tokenizer)
    [ids] = reader.without_limit().read([text], False, "messages")
    return {"input_tokens": len(ids)}
