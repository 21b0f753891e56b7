"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.server.openai.shared import check_model
from stridelm.server.replies import json_reply
from stridelm.server.service import Service

router = APIRouter()


@router.get("/v1/models", response_model=None)
async def models(request: Request) -> Response:
    """The one model, under all of its names."""
    service: Service = request.app.state.service
    return json_reply({"object": "list", "data": [_card(service, name) for name in service.names]})


@router.get("/v1/models/{name:path}", response_model=None)
async def model(name: str, request: Request) -> Response:
    """The model under one of its names."""
    service: Service = request.app.state.service
    check_model(service, name)
    return json_reply(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "stride",
        "root": service.names[0],
        "max_model_len": service.ready.context,
    }
