"""Uvicorn's HTTP/1.1 protocol with limits: on heads, on bodies, on time, on what a connection may hold.

Uvicorn's parser and its callbacks are unchanged. The parser gets what was received in pieces, in turns with those of
other connections (feeding.py). The callbacks here also record how much of a request has arrived; `look`, called twice a
second, closes a connection that takes too long (limits.py). A request's state has the connection as `wire`, so that a
stream can write to it (replies.EventStream), and `admit`, to be called with its tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from stridelm.server.callers import network_of
from stridelm.server.errors import ApiError, bad_request, busy, head_too_large, slow_request
from stridelm.server.feeding import PIECE
from stridelm.server.limits import Guard
from stridelm.server.replies import to_json
from stridelm.server.wire import Wire

MAX_HEADERS = 256
MAX_PIPELINED = 16
MAX_FRAMING = 16 << 10
"""Bytes that a body's framing (sizes, extensions and ends of chunks, trailers) may have beyond those of its payload."""
VERSIONS = ("1.1", "1.0")
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Busy"}


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    guard: Guard
    lost: Callable[[], None]
    transport: Wire

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = Wire(transport)
        self.tenant = "" if self.client is None else network_of(self.client[0])
        self._known = False
        """Whether its first request has told the tenant."""
        self.flow = FlowControl(self.transport)
        self._received = bytearray()
        """What the parser has not got yet."""
        self._in_body = False
        self._head_bytes = 0
        self.opened = time.monotonic()
        self._head_since: float | None = self.opened
        """When the first byte of a head arrived, or, on a new connection, when it opened. None for a connection that
        may be idle."""
        self._body_since = self._last_data = 0.0
        self._body_bytes = 0
        """Bytes of the request's body, held until it is answered."""
        self._framing = 0
        """Bytes of the body so far, less twice its payload."""
        self._answering: RequestResponseCycle | None = None
        """The request that is being answered, or was last; `cycle` is the one that arrived last."""
        self._head_error: ApiError | None = None
        """What is wrong with a head, if a callback of the parser found it."""
        if self.guard.has_room(len(self.connections) - 1):
            self.guard.wait(self)
        else:
            self.connections.discard(self)
            self.transport.write(_raw(busy()))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._disconnect()
        super().connection_lost(exc)
        type(self).lost()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # data is received only so that the client can still read the answer, and dropped
        self._unset_keepalive_if_required()
        self._last_data = time.monotonic()
        if not self._received:
            self.guard.feeder.add(self)
        self._received += data
        self.transport.hold_reading(len(self._received) > PIECE)

    def feed(self) -> bool:
        """Parse a piece of what was received. Whether more is left."""
        if self.transport.is_closing():
            return False
        piece = bytes(self._received[:PIECE])
        del self._received[:PIECE]
        self.transport.hold_reading(len(self._received) > PIECE)
        self._parse(piece)
        return bool(self._received)

    def _parse(self, piece: bytes) -> None:
        if self._in_body:
            self._framing += len(piece)
        else:
            self._head_bytes += len(piece)
            if self._head_since is None:
                self._head_since = self._last_data
        super().data_received(piece)
        if self.transport.is_closing():
            return
        if self._in_body and self._framing > MAX_FRAMING:
            self._refuse(bad_request("most of the body is framing of its chunks; send larger chunks"))
        elif not self._in_body and self._head_bytes > self.guard.limits.head_bytes:
            self._refuse(head_too_large(self.guard.limits.head_bytes))

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.transport.resume_writing()

    # Callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._fault(head_too_large(self.guard.limits.head_bytes))

    def on_headers_complete(self) -> None:
        limit = self.guard.limits.head_bytes
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > limit:
            self._fault(head_too_large(limit))
        if self.parser.get_http_version() not in VERSIONS:
            self._fault(bad_request("this server speaks HTTP/1.1 and HTTP/1.0"))
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fault(bad_request("too many requests at once on one connection; wait for answers"))
        super().on_headers_complete()
        self.cycle.scope["state"] |= {"wire": self.transport, "admit": self._admit}
        self._in_body = self.transport.unread = True
        self._framing = 0
        self._body_since = time.monotonic()

    def on_body(self, body: bytes) -> None:
        self._framing -= 2 * len(body)
        super().on_body(body)
        if not self.cycle.response_complete:
            self._body_bytes += len(body)
            self.guard.received(len(body), self.connections)  # type: ignore[arg-type]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = self.transport.unread = False
        self._head_bytes, self._head_since = 0, None
        if self._known:
            self.guard.unwait(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._busy:
            self._release()
            if self._in_body:  # the rest is not needed
                self.transport.close()
            if self.transport.is_closing():
                self.guard.leave(self)
            else:
                self.guard.wait(self)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._head_error or bad_request("this is not a valid HTTP request"))

    def _unsupported_upgrade_warning(self) -> None:
        """Answer as if no upgrade had been requested, then close: what follows may not be HTTP."""
        self._received.clear()
        if self.cycle is not None:
            self.cycle.keep_alive = False

    # What the guard calls (limits.Holder)

    @property
    def buffered(self) -> tuple[int, int]:
        """Bytes held for it: of its request, and of answers that the client has not read."""
        generation = None if self.cycle is None else self.cycle.scope["state"].get("generation")
        held = 0 if generation is None else generation.held
        return len(self._received) + self._body_bytes, self.transport.waiting + held

    def look(self, now: float) -> None:
        """Close it if it has timed out."""
        limits, wire = self.guard.limits, self.transport
        if wire.idle_seconds(now) > limits.write_s:
            self.hang_up()
        elif wire.is_closing():
            if wire.lingers_until is not None and now > wire.lingers_until and not wire.waiting:
                self.hang_up()
        elif self._in_body:
            if self.flow.read_paused or self._received:  # the server is not reading: the delay is not the client's
                self._last_data = self._body_since = now
            if now - self._body_since > limits.body_s or now - self._last_data > limits.body_idle_s:
                self._refuse(slow_request("body", limits.body_s, limits.body_idle_s))
        elif self._head_since is not None and now - self._head_since > limits.head_s and not self._busy:
            self._refuse(slow_request("head", limits.head_s))

    def hang_up(self) -> None:
        """Close it at once."""
        self._forget()
        self.connections.discard(self)
        self.transport.abort()

    def _admit(self, tenant: str) -> bool:
        """Note whose request has arrived. Returns whether the connection may stay. Until then it counts as waiting:
        many of one address may have sent whole requests before any of them is looked at, and keep another's out."""
        self.guard.unwait(self)
        self.tenant = tenant
        if self._in_body:
            self.guard.wait(self)
        known, self._known = self._known, True
        return known or self.guard.admits(self, self.connections)  # type: ignore[arg-type]

    @property
    def _busy(self) -> bool:
        """Whether a request is being answered."""
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def _refuse(self, error: ApiError) -> None:
        """Send the error and close. If another answer is due first, or has begun, only close."""
        self._forget()
        cycle, silent = self.cycle, False
        if self._busy:
            silent = cycle.response_started or bool(self.pipeline) or not self._in_body
            self._disconnect()
        if not silent:
            self.transport.write(_raw(error))
            self.transport.unread = True
        self.transport.close()
        self.guard.leave(self)

    def _disconnect(self) -> None:
        """Let the request that is being answered end: the answer cannot be sent. Uvicorn tells only the one that
        arrived last, which on a pipelined connection may not have begun."""
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _fault(self, error: ApiError) -> None:
        """Refuse from inside a callback: the parser turns the exception into a call of send_400_response."""
        self._head_error = error
        raise error

    def _release(self) -> None:
        self.guard.received(-self._body_bytes, ())
        self._body_bytes = 0

    def _forget(self) -> None:
        self._received.clear()
        self._release()
        self.guard.unwait(self)


def protocol_for(guard: Guard, lost: Callable[[], None] = lambda: None) -> type[BoundedProtocol]:
    """A protocol class bound to this guard, since uvicorn creates the instances and passes no arguments of ours.
    lost: called once for each connection, when it is closed."""
    return type("GuardedProtocol", (BoundedProtocol,), {"guard": guard, "lost": staticmethod(lost)})


def _raw(error: ApiError) -> bytes:
    body = to_json(error.body)
    lines: list[Any] = [
        f"HTTP/1.1 {error.status} {REASONS.get(error.status, '')}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in error.headers.items() if name != "connection"),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
