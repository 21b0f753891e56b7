"""Routes for operators and routers: /health, /ping, /version, /kv_event_sources, /metrics."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm import __version__
from stridelm.server.errors import unavailable
from stridelm.server.metrics import CONTENT_TYPE
from stridelm.server.replies import json_reply
from stridelm.server.service import Service

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
@router.get("/health", response_model=None)
@router.get("/ping", response_model=None)
async def health(request: Request) -> Response:
    """200 while requests are served, otherwise 503 with the reason."""
    service: Service = request.app.state.service
    why = service.why_unhealthy
    if why is not None:
        raise unavailable(why)
    return json_reply({"status": "ok"})


@router.get("/version", response_model=None)
async def version() -> Response:
    """Stride's version, where vLLM has its own."""
    return json_reply({"version": __version__})


@router.get("/kv_event_sources", response_model=None)
async def kv_event_sources(request: Request) -> Response:
    """Where the prefix cache's events are published, by data-parallel rank, as in vLLM; empty if they are not."""
    service: Service = request.app.state.service
    config = service.config.kv_events
    form = {"encoding": "msgpack", "schema_version": 1}  # vllm-router subscribes only if it is told
    return json_reply({} if config is None else {"0": {**msgspec.structs.asdict(config), **form}})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus, shared by all who ask while others are rendered."""
    service: Service = request.app.state.service
    return Response(await service.rendered.get(), media_type=CONTENT_TYPE)
