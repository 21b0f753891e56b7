"""Routes for operators: /health, /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.server.errors import unavailable
from stridelm.server.metrics import CONTENT_TYPE
from stridelm.server.replies import json_reply
from stridelm.server.service import Service

router = APIRouter()


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while requests are served, otherwise 503 with the reason."""
    service: Service = request.app.state.service
    why = service.why_unhealthy
    if why is not None:
        raise unavailable(why)
    return json_reply({"status": "ok"})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus, shared by all who ask while others are rendered."""
    service: Service = request.app.state.service
    return Response(await service.rendered.get(), media_type=CONTENT_TYPE)
