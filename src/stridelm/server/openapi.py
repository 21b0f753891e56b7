"""The responses in the OpenAPI document: FastAPI documents the requests, but only the statuses 200 and 422."""

from __future__ import annotations

from typing import Any

from stridelm.server.errors import MESSAGES

ERRORS = {
    "400": "The request cannot be served as it stands; the message says what to change",
    "401": "The server requires an API key, and the request has none or another",
    "403": "The key may not do this, or the request is not for this server",
    "404": "No such model",
    "408": "The request took longer than the server allows",
    "413": "The body is larger than the server allows",
    "415": "The body is not declared as JSON",
    "429": "Too many samples are open, or too many large requests are being read; try again after Retry-After seconds",
    "503": "The engine is being restarted, or the server is shutting down; try again after Retry-After seconds",
}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", MESSAGES, "/generate")
RENDERING = ("/v1/completions/render", "/v1/chat/completions/render", f"{MESSAGES}/render")
TEXTS = (f"{MESSAGES}/count_tokens", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
TO_ENGINE = ("/health", "/ping", "/health_generate", "/flush_cache", "/abort_request")
MORE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GENERATING, ("404", "408", "429", "503")),
    "/v1/models/{name}": ("404",),
    **dict.fromkeys((*RENDERING, *TEXTS), ("404", "429", "503")),
    **dict.fromkeys(TO_ENGINE, ("503",)),
    "/abort_request": ("429", "503"),
}
"""Errors of a route in addition to those that follow from its path and its parameters."""
TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GENERATING, ("application/json", "text/event-stream")),
    **dict.fromkeys(("/metrics", "/flush_cache"), ("text/plain",)),
    "/": ("text/html",),
    "/v1/loads": ("application/json", "text/plain"),
    "/abort_request": (),
}
"""Content types of a route's success, if not only JSON."""

_WORD = {"type": ["string", "null"]}
_FAULT = {
    "type": "object",
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _WORD, "code": _WORD},
    "required": ["message", "type"],
}
ERROR = {"type": "object", "properties": {"error": _FAULT}, "required": ["error"]}
"""The body of every error (errors.py); in Anthropic's form (/v1/messages) it has no param and code."""


def complete(document: dict[str, Any]) -> None:
    """Add the routes' responses to FastAPI's document."""
    schemas = document["components"]["schemas"]
    for fastapis in ("HTTPValidationError", "ValidationError"):
        del schemas[fastapis]
    schemas["Error"] = ERROR
    for path in {*MORE, *TYPES}:
        assert path in document["paths"], f"there is no route {path}"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _answers(path, operation)


def _answers(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    if path in TYPES:
        responses["200"]["content"] = {kind: {"schema": {}} for kind in TYPES[path]}
    statuses = set(MORE.get(path, ()))
    if responses.pop("422", None):  # FastAPI's status for invalid input; here it is 400
        statuses.add("400")
    if "requestBody" in operation:
        statuses |= {"413", "415"}
    statuses.add("403")
    if path != "/":
        statuses.add("401")
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses |= {status: {"description": ERRORS[status], "content": content} for status in sorted(statuses)}
