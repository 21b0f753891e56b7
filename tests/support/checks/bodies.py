"""The bodies of the server's routes: the models that read them, and the least that each needs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from stridelm.server.anthropic.schemas import CountRequest, MessagesRequest
from stridelm.server.openai.schemas import ChatRequest, CompletionRequest
from stridelm.server.responses.schemas import ResponsesRequest
from stridelm.server.sglang.schemas import (
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeConversation,
    TokenizeRequest,
)

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": {CompletionRequest: {"prompt": "x"}},
    "/v1/chat/completions": {ChatRequest: CHAT},
    "/v1/responses": {ResponsesRequest: {"input": "x"}},
    "/v1/messages": {MessagesRequest: {**CHAT, "max_tokens": 1}},
    "/v1/messages/count_tokens": {CountRequest: CHAT},
    "/generate": {GenerateRequest: {"text": "x"}},
    "/abort_request": {AbortRequest: {}},
    "/tokenize": {TokenizeRequest: {"prompt": "x"}, TokenizeConversation: CHAT},
    "/detokenize": {DetokenizeRequest: {"tokens": [1]}},
}
"""By route."""
