"""Answers to requests for routes that the server does not have: what it has, and what to use instead."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stridelm.server.errors import ApiError
from stridelm.server.replies import error_reply

LONGEST_PATH = 80
"""Characters of a path that are repeated."""
MAX_MESSAGE = 2000
"""Characters of a message that lists all routes."""
INSTEAD = {
    "/v1/embeddings /v1/embed /embed /api/embed /api/embeddings /pooling": "embeddings need another model and server",
    "/v1/rerank /v2/rerank /rerank /v1/score /score /v1/classify /classify": "ratings need another model and server",
    "/v1/audio /v1/images /v1/videos /v1/realtime": "the model reads and writes only text; use /v1/chat/completions",
    "/v1/responses": "nothing is stored, so there is none to fetch or cancel; send all input to POST /v1/responses",
    "/v1/assistants /v1/threads /v1/conversations": "nothing is stored; send it all to /v1/chat/completions",
    "/v1/batches /v1/files": "requests that are sent at once share batches; send each by itself, or use LLM.generate",
    "/v1/messages/batches": "requests that are sent at once share batches; send each by itself to /v1/messages",
    "/api/chat": "this is not Ollama's API; use /v1/chat/completions",
    "/api/generate": "this is not Ollama's API; use /v1/completions",
    "/api/tags": "this is not Ollama's API; use /v1/models",
}
"""Routes of other servers, or what they begin with -> what to do instead."""


def no_route(app: FastAPI, request: Request) -> Response:
    """A 404 that says what to use instead, and lists the app's routes."""
    path, routes = request.url.path, app.openapi()["paths"]
    hints = [f": {why}" for paths, why in INSTEAD.items() for one in paths.split() if f"{path}/".startswith(f"{one}/")]
    near = ("/v1" + path, path.removeprefix("/v1"))  # of a client whose base URL is without /v1, or has it twice
    hints += [f": use {one}" for one in near if one in routes]
    by_method = dict[str, list[str]]()
    for route, methods in routes.items():
        by_method.setdefault(" or ".join(methods).upper(), []).append(route)
    listed = "; ".join(f"{methods} {', '.join(paths)}" for methods, paths in by_method.items())
    what = f"there is no route {request.method} {path[:LONGEST_PATH]}{''.join(hints[:1])}. Routes: {listed}"
    return error_reply(ApiError(404, what, code="unknown_url", longest=MAX_MESSAGE), path)


def no_method(app: FastAPI, request: Request, error: HTTPException) -> Response:
    """A 405 that names the methods of the route."""
    path = request.url.path
    one = (error.headers or {}).get("Allow", "").split(", ")  # of several routes with this path, the first one's
    allow = ", ".join(sorted(map(str.upper, app.openapi()["paths"].get(path, one))))
    what = f"{path[:LONGEST_PATH]} does not take {request.method}; use {allow}"
    reply = error_reply(ApiError(405, what, code="method_not_allowed"), path)
    reply.headers["allow"] = allow
    return reply
