"""POST /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.server.errors import bad_request
from stridelm.server.large import LargeBodies
from stridelm.server.openai.chat import prepare
from stridelm.server.openai.shared import reply
from stridelm.server.responses.answer import ResponseAnswer
from stridelm.server.responses.schemas import ResponsesRequest

router = APIRouter(route_class=LargeBodies)


@router.post("/v1/responses", response_model=None)
async def respond(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, as OpenAI's Responses API does. Nothing is stored."""
    chat = body.as_chat()
    reading = await prepare(chat, request)
    if chat.logprobs and reading.parser is not None:
        why = "log-probabilities are of messages that can have neither calls nor reasoning; use /v1/chat/completions"
        raise bad_request(f"include: {why}", "include")
    return await reply(request, [reading.prompt], ResponseAnswer(request.app.state.service, body, reading), body.stream)
