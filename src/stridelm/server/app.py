"""The application: all routes around one Service."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from stridelm import __version__
from stridelm.heap import freeze_heap
from stridelm.server import ops, playground
from stridelm.server.anthropic import route as messages
from stridelm.server.callers import Keys
from stridelm.server.elsewhere import no_method, no_route
from stridelm.server.errors import ApiError
from stridelm.server.middleware import OPEN_PATHS, RequestMiddleware
from stridelm.server.openai import chat, completions, models, render
from stridelm.server.openapi import complete
from stridelm.server.origins import default_hosts
from stridelm.server.replies import ClientGone, error_reply
from stridelm.server.responses import route as responses
from stridelm.server.service import Service
from stridelm.server.sglang import generate, info, loads, texts
from stridelm.server.validation import invalid

logger = logging.getLogger(__name__)

NOBODY = 499
"""nginx's status for a client that disconnected: logged, never sent."""


def build_app(service: Service, salt: bytes | None = None) -> FastAPI:
    """The caller connects and stops the service. salt: as in Keys."""
    config = service.config
    app = FastAPI(title="Stride", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    chats = (chat, responses, messages)
    for part in (completions, *chats, render, models, generate, info, loads, texts, ops, playground):
        app.include_router(part.router)
    complete(app.openapi())  # FastAPI caches the document
    freeze_heap()
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _fault)
    app.add_middleware(
        RequestMiddleware,
        keys=Keys(config.api_key or (), config.operator_key or (), salt),
        hosts=config.allowed_hosts or default_hosts(config.host),
        open_paths=("/",) if config.protect_metrics else OPEN_PATHS,
        max_body_mib=config.max_body_mib,
        access_log=config.access_log,
        refused=service.metrics.refused,
    )
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_reply(error, request.url.path)


async def _invalid(request: Request, error: Exception) -> Response:
    """pydantic's messages without the input, which may be a prompt."""
    assert isinstance(error, RequestValidationError)
    return error_reply(invalid(error.errors()), request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return no_route(request.app, request)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return no_method(request.app, request, error)
    if isinstance(error.__cause__, ApiError):  # raised while FastAPI read the body
        return error_reply(error.__cause__, request.url.path)
    return error_reply(ApiError(error.status_code, str(error.detail)), request.url.path)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=NOBODY)


async def _fault(request: Request, error: Exception) -> Response:
    logger.error("a request failed", exc_info=error)
    fault = ApiError(500, "internal server error; see the server's log", kind="server_error")
    return error_reply(fault, request.url.path)
