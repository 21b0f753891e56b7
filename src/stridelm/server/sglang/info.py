"""The other routes that SGLang's clients, router and benchmark use."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.responses import PlainTextResponse, Response

from stridelm import __version__
from stridelm.options import flat
from stridelm.server.callers import caller_of
from stridelm.server.errors import bad_request, forbidden, unavailable
from stridelm.server.large import LargeBodies
from stridelm.server.replies import json_reply, while_connected
from stridelm.server.service import Service
from stridelm.server.sglang.probe import Probe
from stridelm.server.sglang.rids import rids_of
from stridelm.server.sglang.schemas import AbortRequest

router = APIRouter(route_class=LargeBodies)

POLL_S = 0.02
PRIVATE = ("api_key", "operator_key", "chat_template", "served_model_name", "model", "drafter_model")
"""Options that are secret, contain a path on the server, or are reported under another name."""

SINGLE = {**dict.fromkeys(("dp_size", "tp_size", "pp_size"), 1), "disaggregation_mode": "null", "is_embedding": False}
"""What one server of one model is to a router."""
FOR_CLIENTS = (
    *("model_id", "model_path", "tokenizer_path", "served_model_name", "drafter", "depth", "acceptance"),
    *("context_length", "max_depth", "max_draft_rows", "block_size", "max_total_tokens", "max_running_requests"),
    *("version", "weight_version", "internal_states", *SINGLE),
)
"""The fields of /server_info that callers other than operators get."""

Seconds = Annotated[float, Query(ge=0, le=3600, allow_inf_nan=False)]


@router.get("/health_generate", response_model=None)
async def health_generate(request: Request) -> Response:
    """200 if the engine generates a token, or is seen to make a step while it is busy; otherwise 503. Concurrent
    requests share one probe."""
    service: Service = request.app.state.service
    if service.why_unhealthy is not None:
        raise unavailable(service.why_unhealthy)
    await while_connected(request, _probe_of(request.app).check(), lambda: None)
    return json_reply({"status": "ok"})


def _probe_of(app: FastAPI) -> Probe:
    """The application's probe, created on first use."""
    if not hasattr(app.state, "probe"):
        app.state.probe = Probe(app.state.service)
    probe: Probe = app.state.probe
    return probe


@router.get("/model_info", response_model=None)
@router.get("/get_model_info", response_model=None)
async def model_info(request: Request) -> Response:
    """The model, as the operator named it."""
    service: Service = request.app.state.service
    config = json.loads((Path(service.ready.model) / "config.json").read_text(encoding="utf-8"))
    answer = {
        **_paths(service),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
    }
    return json_reply(answer)


@router.get("/server_info", response_model=None)
@router.get("/get_server_info", response_model=None)
async def server_info(request: Request) -> Response:
    """The server's options, the settings that it resolved from them, and its state; with a client's key, without the
    options."""
    service: Service = request.app.state.service
    engine, ready = service.engine_config, service.ready
    options = {**flat(engine), **asdict(service.config)}
    answer = {
        **{name: value for name, value in options.items() if name not in PRIVATE},
        **_paths(service),
        "model_id": service.names[0],
        "served_model_name": service.names[0],
        "drafter_model": [Path(path).name for path in engine.drafter_models],
        **{name: getattr(ready, name) for name in ("drafter", "depth", "acceptance", "device", "dtype")},
        "mask_token_id": ready.mask_ids,
        "context_length": ready.context,
        "max_running_requests": engine.max_num_seqs,
        "max_prefill_tokens": engine.max_num_batched_tokens,
        "block_size": ready.page_size,
        "max_total_tokens": ready.pages * ready.page_size,
        **SINGLE,
        "weight_version": "default",
        "version": __version__,
        "internal_states": [_state(service)],
    }
    if not caller_of(request).operator:
        answer = {name: answer[name] for name in FOR_CLIENTS}
    return json_reply(answer)


def _paths(service: Service) -> dict[str, str]:
    model = service.engine_config.model
    path = service.names[0] if model is None else str(model)
    return {"model_path": path, "tokenizer_path": path}


def _state(service: Service) -> dict[str, Any]:
    report = service.report
    if report is None:
        return {"avg_spec_accept_length": None}
    stats = report.stats
    # Of the tokens that a step emits for a request, all but one were drafted.
    steps = stats.emitted - stats.accepted
    return {
        "avg_spec_accept_length": stats.emitted / steps if steps > 0 else None,
        "running_requests": report.running,
        "waiting_requests": report.waiting,
        "steps": stats.steps,
        "emitted_tokens": stats.emitted,
        "drafted_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
    }


@router.post("/flush_cache", response_model=None)
async def flush_cache(request: Request, timeout: Seconds = 0.0) -> Response:
    """Drop cached prefixes. timeout: seconds to wait for running requests, after which the flush is refused."""
    service: Service = request.app.state.service
    if not caller_of(request).operator:
        raise forbidden("flushing the cache affects every client; send an operator's key")
    if not await while_connected(request, _flushed(service, timeout)):
        raise bad_request("the cache was not flushed, because requests are running; wait for them, or set timeout")
    return PlainTextResponse("Cache flushed.\n")


async def _flushed(service: Service, timeout: float) -> bool:
    """Whether the cache was flushed within this time, in seconds. The engine decides: it alone knows the samples of all
    front-ends."""
    end = time.monotonic() + timeout
    while not await service.engine_client.flush():
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(POLL_S)
    return True


@router.post("/abort_request", response_model=None)
async def abort_request(body: AbortRequest, request: Request) -> Response:
    """End a request, or all; with a client's key, only requests made with that key. The answer of an aborted request is
    what it has generated so far. Aborting one that has already ended is not an error."""
    service: Service = request.app.state.service
    caller = caller_of(request)
    if body.abort_all:
        service.abort(caller)
        service.peers.abort(None, caller)
    elif body.rid:
        rids_of(request.app).abort(body.rid, caller)
        service.peers.abort(body.rid, caller)
    else:
        raise bad_request("give the rid of a request, or abort_all", "rid")
    return Response(status_code=200)
