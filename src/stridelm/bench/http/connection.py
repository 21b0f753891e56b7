"""A connection that sends a request and collects its answer, as raw bytes with their times."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import cast

from stridelm.bench.http.answer import Answer

CONNECT_S = 30.0


class Connection(asyncio.Protocol):
    """Sends one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._waiting = None

    async def send(self, message: bytes) -> Answer:
        """Raises ConnectionError if the server closes the connection before the answer is complete."""
        if self.closed:
            raise ConnectionError("the server closed the connection between two requests")
        done = asyncio.get_running_loop().create_future()
        self._answer, self._waiting = Answer(time.monotonic()), done
        self.transport.write(message)
        return await done

    @property
    def closed(self) -> bool:
        return self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        if self._waiting is not None and self._answer.add(time.monotonic(), data):
            self._waiting.set_result(self._answer)
            self._waiting = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None:
            self._waiting.set_exception(ConnectionError(f"the connection was lost in an answer ({exc})"))
            self._waiting = None

    _answer: Answer
    _waiting: asyncio.Future[Answer] | None


async def connect(host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
    """Raises ConnectionError if nobody takes the connection within CONNECT_S, and OSError if it is refused."""
    connecting = asyncio.get_running_loop().create_connection(Connection, host, port, ssl=tls)
    try:
        return (await asyncio.wait_for(connecting, CONNECT_S))[1]
    except asyncio.TimeoutError as error:
        raise ConnectionError(f"{host}:{port} took no connection within {CONNECT_S:g} s") from error


def post(host: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A request as it is sent. host: with the port. body: JSON."""
    lines = {"host": host, "content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body
