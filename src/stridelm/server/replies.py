"""Sending answers: JSON, streams of server-sent events, and what happens when the client disconnects."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stridelm.server.chunk import Chunk
from stridelm.server.errors import ApiError
from stridelm.server.generation import Generation
from stridelm.server.wire import Wire, nothing

T = TypeVar("T")
to_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def json_reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


class PartsReply(Response):
    """A reply of JSON in parts, which are never joined."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self._parts = parts
        self.init_headers({"content-length": str(sum(map(len, parts))), "content-type": "application/json"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def listed(items: Sequence[bytes]) -> list[bytes]:
    """A JSON list of the items, in parts."""
    parts = [b"["]
    for item in items:
        parts += (item, b",")
    return [*parts[:-1], b"]"] if items else [b"[]"]


def error_reply(error: ApiError, path: str = "") -> Response:
    """path: of the request; under some, errors have another form than OpenAI's."""
    return json_reply(error.body_at(path), error.status, error.headers)


def event(content: Any) -> bytes:
    """One server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    return b"data: " + to_json(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(content))


class ClientGone(Exception):
    """The client has disconnected."""


class Answer(ABC):
    """An answer, whole or as a stream of server-sent events."""

    keeps = False
    """generation.Reader.keeps"""
    tail = DONE
    """Follows the last event."""

    @abstractmethod
    async def whole(self, generation: Generation) -> list[bytes]:
        """All of it as JSON, in parts. Raises ApiError if the engine dies."""

    def opening(self) -> bytes:
        """Events before there is any output."""
        return b""

    @abstractmethod
    def events(self, arrived: Sequence[tuple[int, Chunk]]) -> bytes | None:
        """The events of what has arrived; None if that takes longer: it is then called again, with nothing."""

    def closing(self) -> bytes:
        """Events after the last output."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The last event, where there is an error."""
        return event(error.body)


async def send(request: Request, generation: Generation, answer: Answer, stream: bool | None) -> Response:
    """Raises ApiError for an answer that fails before anything of it was sent."""
    close = partial(request.app.state.service.engine_client.abandon, generation)
    if stream:
        return EventStream(generation, answer, close)
    return PartsReply(await while_connected(request, answer.whole(generation), close))


class EventStream(Response):
    """Sends an answer's events as its output arrives. `close` is called at the end, to release the generation. If the
    client disconnects, that is at once, whether or not there is anything to send."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._generation, self._answer, self._close = generation, answer, close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", "transfer-encoding": "chunked"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await _unless_gone(receive, self._send_all(send, scope["state"]["wire"]), self._close)

    async def _send_all(self, send: Send, wire: Wire) -> None:
        """The head and the end go through ASGI; between them events are written directly, by _Writer."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        wire.on_writable = self._generation.wake
        try:
            if opening := self._answer.opening():
                wire.write_chunk(opening)
            await self._generation.read_by(_Writer(self._answer, wire))
            last = self._answer.closing()
        except ApiError as error:
            last = self._answer.failed(error)
        finally:
            wire.on_writable = nothing
        await send({"type": "http.response.body", "body": last + self._answer.tail, "more_body": False})


class _Writer:
    """Reads a generation for a stream."""

    def __init__(self, answer: Answer, wire: Wire) -> None:
        self.keeps = answer.keeps
        self._answer, self._wire = answer, wire

    @property
    def ready(self) -> bool:
        return self._wire.writable

    def take(self, arrived: Sequence[tuple[int, Chunk]]) -> bool:
        events = self._answer.events(arrived)
        if events:
            self._wire.write_chunk(events)
        return events is None


async def while_connected(
    request: Request, work: Coroutine[Any, Any, T], close: Callable[[], None] = lambda: None
) -> T:
    """The result of `work`. Raises ClientGone, with the work cancelled, if the client disconnects first. `close` is
    called at the end in any case: a coroutine that is cancelled before its first line could not do it itself."""
    return await _unless_gone(request.receive, work, close)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T], close: Callable[[], None]) -> T:
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        close()
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
