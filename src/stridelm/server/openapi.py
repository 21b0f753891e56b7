"""The OpenAPI document's answers: FastAPI fills in what requests are, and knows of no status but 200 and 422."""

from __future__ import annotations

from typing import Any

ERRORS = {
    "400": "What was asked for cannot be had; the message says what to change",
    "401": "The server has an API key, and the request bears none or another",
    "403": "The key may not do this, or the request is not for this server",
    "404": "No such model",
    "408": "The request took longer than the server allows",
    "413": "The body is larger than the server allows",
    "415": "The body does not say that it is JSON",
    "429": "Too many samples are open, or too many large requests are being read; come again after Retry-After seconds",
    "503": "The engine is being started again, or the server is shutting down; come again after Retry-After seconds",
}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate")
TEXTS = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
TO_ENGINE = ("/health", "/health_generate", "/flush_cache", "/abort_request")
MORE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GENERATING, ("404", "408", "429", "503")),
    "/v1/models/{name}": ("404",),
    **dict.fromkeys(TEXTS, ("404", "429", "503")),
    **dict.fromkeys(TO_ENGINE, ("503",)),
    "/abort_request": ("429", "503"),
}
"""Errors of a route beside those that its place and its parameters bring."""
TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GENERATING, ("application/json", "text/event-stream")),
    **dict.fromkeys(("/metrics", "/flush_cache"), ("text/plain",)),
    "/": ("text/html",),
    "/abort_request": (),
}
"""What a route's success is made of, where it is not JSON alone."""

_WORD = {"type": ["string", "null"]}
_FAULT = {
    "type": "object",
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _WORD, "code": _WORD},
    "required": ["message", "type", "param", "code"],
}
ERROR = {"type": "object", "properties": {"error": _FAULT}, "required": ["error"]}
"""The body of every error (errors.py)."""


def complete(document: dict[str, Any]) -> None:
    """Write into FastAPI's document what its routes answer."""
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
    if responses.pop("422", None):  # FastAPI's for what is not valid; here it is 400
        statuses.add("400")
    if "requestBody" in operation:
        statuses |= {"413", "415"}
    statuses.add("403")
    if path != "/":
        statuses.add("401")
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses |= {status: {"description": ERRORS[status], "content": content} for status in sorted(statuses)}
