"""The load, by which routers choose a server: /v1/loads, and the older /get_load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm import __version__
from stridelm.engine.stats import EngineStats
from stridelm.server.errors import bad_request
from stridelm.server.messages import Report
from stridelm.server.metrics import CONTENT_TYPE
from stridelm.server.replies import json_reply
from stridelm.server.service import Service

router = APIRouter()

SECTIONS = {"core": None, "spec": "speculative", "queues": "queues", "memory": None, "lora": None, "disagg": None}
"""SGLang's names -> a section of the load. `core` is the rest of it, which is always there; the last three never are,
as in SGLang where they do not apply."""
DOWN = Report(EngineStats(), running=0, waiting=0, open=0, pages={}, row_budget=0)
"""What there is to report while there is no engine."""


@router.get("/v1/loads", response_model=None)
async def loads(
    request: Request,
    dp_rank: int | None = None,
    include: str | None = None,
    format: Literal["json", "prometheus"] = "json",
) -> Response:
    """The load by data-parallel rank, of which there is one. include: sections, separated by commas."""
    service: Service = request.app.state.service
    asked = {"all"} if include is None else {name.strip() for name in include.split(",")}
    if unknown := sorted(asked - SECTIONS.keys() - {"all"}):
        raise bad_request(f"include: unknown {', '.join(unknown)}; choose from {', '.join(SECTIONS)}, all", "include")
    left_out = set() if "all" in asked else {section for name, section in SECTIONS.items() if name not in asked}
    load = {name: value for name, value in _load(service).items() if name not in left_out}
    ranks = [load] if dp_rank in (None, 0) else []
    if format == "prometheus":
        return Response("".join(line for rank in ranks for line in _lines(rank)), media_type=CONTENT_TYPE)
    answer = {
        "timestamp": datetime.now(timezone.utc).isoformat(),
        "version": __version__,
        "accelerator": service.ready.device,
        "num_accelerators": 1,
        "dp_rank_count": 1,
        "loads": ranks,
    }
    return json_reply(answer)


@router.get("/get_load", response_model=None)
async def get_load(request: Request) -> Response:
    """The load as SGLang gave it before /v1/loads."""
    service: Service = request.app.state.service
    report = service.report or DOWN
    answer = {
        "dp_rank": 0,
        "num_reqs": service.open_samples + service.peers.open_samples,
        "num_waiting_reqs": report.waiting,
        "num_tokens": _used(report) * service.ready.page_size,
    }
    return json_reply([answer])


def _load(service: Service) -> dict[str, Any]:
    """SGLang's fields (srt/managers/load_snapshot.py), as of the engine's last report."""
    report, ready, most = service.report or DOWN, service.ready, service.engine_config.max_num_seqs
    pages = max((group["total"] for group in report.pages.values()), default=ready.pages)
    used, usage = _used(report) * ready.page_size, _used(report) / pages
    stats = report.stats
    # Of the tokens that a step emits for a request, all but one were drafted.
    spec = {
        "accept_length": round(stats.emitted / max(stats.emitted - stats.accepted, 1), 3),
        "accept_rate": round(stats.accepted / max(stats.drafted, 1), 4),
    }
    grammar = max(report.open - report.running - report.waiting, 0)
    return {
        "dp_rank": 0,
        "timestamp": time.time(),
        "num_running_reqs": report.running,
        "num_waiting_reqs": report.waiting,
        "num_total_reqs": report.open,
        "num_waiting_uncached_tokens": report.pending_tokens,
        "num_used_tokens": used,
        "num_total_tokens": used + report.pending_tokens,
        "max_total_num_tokens": pages * ready.page_size,
        "token_usage": round(usage, 4),
        "gen_throughput": round(report.tokens_per_s, 2),
        "cache_hit_rate": round(stats.cached_prompt / max(stats.prompt, 1), 4),
        "utilization": round(max(report.running / most, usage), 4),
        "max_running_requests": most,
        "speculative": spec,
        "queues": {"waiting": report.waiting, "grammar": grammar, "paused": 0, "retracted": 0},
    }


def _used(report: Report) -> int:
    """Pages held in the fullest group."""
    return max((pages["held"] for pages in report.pages.values()), default=0)


def _lines(load: Mapping[str, Any]) -> Iterator[str]:
    """A load in Prometheus' text format, under SGLang's names."""
    prefixes = {"speculative": "spec_", "queues": "queues_"}
    for name, value in load.items():
        for key, number in value.items() if name in prefixes else [(name, value)]:
            if key != "dp_rank":
                shown = f"sglang_{prefixes.get(name, '')}{key}"
                yield f'# TYPE {shown} gauge\n{shown}{{dp_rank="{load["dp_rank"]}"}} {number}\n'
