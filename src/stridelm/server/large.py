"""Routes whose bodies may be large: a worker (workers/bodies.py) reads large bodies, to keep that off the event
loop."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive

from stridelm.server.body import CheckedRequest
from stridelm.server.callers import caller_of
from stridelm.server.messages import unpacked
from stridelm.server.prompts import PromptReader
from stridelm.server.replies import ClientGone, to_json, while_connected

SMALL_BODY = 32 << 10
"""Bytes; reading this much holds the loop for less than twenty milliseconds, whatever it contains."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class LargeBodies(APIRoute):
    """A route like any other, except that it gets only the small part of a large body; the rest, as the worker read
    it, is in the request's state, under `prompts` or `reply`."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_large(request: Request) -> Response:
            try:
                body = [part async for part in request.stream()]  # not joined if large: that takes milliseconds
            except ClientDisconnect as error:
                raise ClientGone from error
            if sum(map(len, body)) <= SMALL_BODY or not _is_json(request):
                return await handle(CheckedRequest(request.scope, _with_body(b"".join(body), request.receive)))
            service = request.app.state.service
            read = await while_connected(request, service.read_body(self.path, body, caller_of(request)))
            if read.reply is not None:
                request.state.reply = read.reply
            if read.prompts is not None:
                request.state.prompts = [unpacked(prompt) for prompt in read.prompts]
            return await handle(CheckedRequest(request.scope, _with_body(read.rest, request.receive)))

        return handle_large


def prompts_read(request: Request) -> list[array[int]] | None:
    """The token ids of the prompts, if a worker has read them."""
    prompts: list[array[int]] | None = getattr(request.state, "prompts", None)
    return prompts


async def answered(request: Request, body: Any, answer: Callable[[Any, PromptReader], Any]) -> Response:
    """What `answer` makes of a body, unless a worker has made it."""
    service = request.app.state.service
    reply: bytes | None = getattr(request.state, "reply", None)
    if reply is None:
        work = service.beside(caller_of(request), lambda _: to_json(answer(body, service.reader)))
        reply = await while_connected(request, work)
    return Response(reply, media_type="application/json")


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _with_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns this body first, then whatever `receive` returns."""
    body_sent = False

    async def receive_body() -> Message:
        nonlocal body_sent
        if body_sent:
            return await receive()
        body_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body
