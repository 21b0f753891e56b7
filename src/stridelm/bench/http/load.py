"""Sends the requests of a load and collects their answers, which are read only once the load is over."""

from __future__ import annotations

import asyncio
import gc
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from stridelm.bench.http.answer import Answer
from stridelm.bench.http.connection import Connection, connect, post
from stridelm.bench.http.server import Server


@dataclass(frozen=True)
class Sent:
    """answers: in the order of the requests, or the error instead. busy: the share of the time for which this process
    computed."""

    seconds: float
    answers: list[Answer | Exception]
    busy: float


def send(
    server: Server, route: str, bodies: Sequence[bytes], streams: int | None, arrivals: Sequence[float] | None
) -> Sent:
    """Send all requests: `streams` at a time, or as they arrive, in seconds after the beginning."""
    assert (streams is None) != (arrivals is None)
    path = server.path(route)
    messages = [post(server.authority, path, body, server.headers) for body in bodies]
    return uvloop.run(_Sender(server, messages).send(streams, arrivals))


class _Sender:
    def __init__(self, server: Server, messages: Sequence[bytes]) -> None:
        self._server = server
        self._messages = messages
        self._answers: dict[int, Answer | Exception] = {}
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if server.secure else None

    async def send(self, streams: int | None, arrivals: Sequence[float] | None) -> Sent:
        count = len(self._messages)
        # Connections are open before the time begins.
        self._idle = [await self._connect() for _ in range(min(count, streams or 1))]
        collecting = gc.isenabled()
        gc.disable()
        try:
            worked, began = time.process_time(), time.monotonic()
            if arrivals is None:
                assert streams is not None
                pending = deque(range(count))
                await asyncio.gather(*(self._stream(pending) for _ in range(streams)))
            else:
                await asyncio.gather(*(self._at(began + when, number) for number, when in enumerate(arrivals)))
            seconds = time.monotonic() - began
            busy = (time.process_time() - worked) / seconds
        finally:
            if collecting:
                gc.enable()
            for connection in self._idle:
                connection.transport.close()
        return Sent(seconds, [self._answers[number] for number in range(count)], busy)

    async def _stream(self, pending: deque[int]) -> None:
        while pending:
            await self._ask(pending.popleft())

    async def _at(self, when: float, number: int) -> None:
        await asyncio.sleep(when - time.monotonic())
        await self._ask(number)

    async def _ask(self, number: int) -> None:
        try:
            self._idle = [each for each in self._idle if not each.closed]
            connection = self._idle.pop() if self._idle else await self._connect()
            self._answers[number] = await connection.send(self._messages[number])
            self._idle.append(connection)
        except OSError as error:
            self._answers[number] = error

    async def _connect(self) -> Connection:
        return await connect(self._server.host, self._server.port, self._tls)
