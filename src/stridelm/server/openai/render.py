"""POST /v1/completions/render and /v1/chat/completions/render: the token ids that a request has, without running it, as
in vLLM. Routers that know which prefixes a server has cached ask for them before they choose one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.server.callers import caller_of
from stridelm.server.engine_client import Prompt
from stridelm.server.large import LargeBodies
from stridelm.server.messages import plain
from stridelm.server.openai.chat import prepare
from stridelm.server.openai.completions import completion_params, completion_prompts
from stridelm.server.openai.schemas import ChatRequest, CompletionRequest, SamplingFields
from stridelm.server.openai.shared import check_model
from stridelm.server.replies import PartsReply, listed, to_json
from stridelm.server.service import Service

router = APIRouter(route_class=LargeBodies)


@router.post("/v1/completions/render", response_model=None)
async def render_completion(body: CompletionRequest, request: Request) -> Response:
    """A list with an entry for each prompt."""
    service: Service = request.app.state.service
    check_model(service, body.model)
    params = completion_params(body, service)
    prompts = [Prompt(ids, params) for ids in await completion_prompts(body, request)]
    return PartsReply(listed(await rendered(body, request, prompts)))


@router.post("/v1/chat/completions/render", response_model=None)
async def render_chat(body: ChatRequest, request: Request) -> Response:
    """The conversation's one prompt."""
    reading = await prepare(body, request)
    return PartsReply(await rendered(body, request, [reading.prompt]))


async def rendered(body: SamplingFields, request: Request, prompts: Sequence[Prompt]) -> list[bytes]:
    """For each prompt the JSON of vLLM's GenerateRequest (entrypoints/scale_out/token_in_token_out/protocol.py). Its
    id is the request's own, where the client gave one."""
    service: Service = request.app.state.service
    params = prompts[0].params
    sampling = {name: value for name, value in plain(params).items() if name not in ("cache_salt", "priority")}
    common: dict[str, Any] = {
        "sampling_params": {**sampling, "n": params.n},
        "model": service.names[0],
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt,
        "priority": params.priority,
    }
    base = request.state.request_id or secrets.token_hex(16)
    entries = []
    async with service.turns(caller_of(request).tenant) as turn:
        for index, prompt in enumerate(prompts):
            name = f"{base}-{index}" if len(prompts) > 1 else base
            entries.append(to_json({"request_id": name, "token_ids": prompt.ids.tolist(), "features": None, **common}))
            await turn.breathe()
    return entries
