"""One front-end process: an HTTP server whose connections and engine come from the parent.

It is forked from the nursery, and runs what a single HTTP process runs; only the way to the engine, and to the port,
is another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import uvloop
from fastapi import FastAPI

from stridelm.server.frontends.channel import Channel
from stridelm.server.frontends.link import ParentLink
from stridelm.server.frontends.messages import (
    Closed,
    Drain,
    Drained,
    Exit,
    Hello,
    Serving,
    Start,
    ToFrontend,
    to_frontend,
)
from stridelm.server.http import HttpServer
from stridelm.server.lifeline import end_with
from stridelm.server.limits import Limits
from stridelm.server.service import Service

logger = logging.getLogger(__name__)

SNAPSHOT_S = 1.0


def run(service: Service, app: FastAPI, nursery: int, control: socket.socket, connections: socket.socket) -> None:
    """Serve, and exit. Called in a process just forked by the nursery.

    control: to the parent. connections: on which accepted ones arrive.
    """
    try:
        end_with(nursery)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        uvloop.run(_serve(service, app, control, connections))
    except BaseException:
        logger.critical("a front-end process failed", exc_info=True)
        os._exit(1)
    os._exit(0)


async def _serve(service: Service, app: FastAPI, control: socket.socket, connections: socket.socket) -> None:
    channel: Channel[ToFrontend] = await Channel.over(control, to_frontend)
    channel.send(Hello(os.getpid()))
    messages = channel.messages()
    start = await anext(messages)
    assert isinstance(start, Start)
    link = ParentLink(start, service, app, channel)
    while link.ready is None:
        link.take(await anext(messages))
    service.connect(link, link)
    server = _Server(service, app, channel, connections)

    async def listen() -> None:
        async for message in messages:
            if isinstance(message, Drain):
                server.drain()
            elif isinstance(message, Exit):
                server.leave(message.force)
            else:
                link.take(message)
        server.leave(force=True)  # the parent is gone

    async def report() -> None:
        while True:
            link.send_snapshot()
            await asyncio.sleep(SNAPSHOT_S)

    tasks = [asyncio.create_task(work) for work in (server.serve(sockets=[]), listen(), report())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[1].done() and tasks[1].exception() is None:
            await tasks[0]
        for task in tasks:
            if task.done():
                task.result()  # raises what ended it
    finally:
        await service.stop()
        link.close()


class _Server(HttpServer):
    """Listens on no port: connections arrive as descriptors."""

    def __init__(
        self, service: Service, app: FastAPI, channel: Channel[ToFrontend], connections: socket.socket
    ) -> None:
        assert service.config.api_server_count is not None
        limits = Limits.of(service.config, service.config.api_server_count)
        super().__init__(service, app, limits, self._begin, lambda: channel.send(Closed()))
        self._channel, self._connections = channel, connections
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        connections.setblocking(False)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the parent's affair."""
        yield

    def drain(self) -> None:
        """Refuse new requests; tell the parent when the running ones have ended."""
        if not self._draining:
            self._draining = True
            self._begin_task(self._drain())

    def leave(self, force: bool) -> None:
        """Stop serving. force: without waiting for the last events of streams."""
        self.should_exit = True
        self.force_exit = self.force_exit or force
        asyncio.get_running_loop().remove_reader(self._connections)

    async def _drain(self) -> None:
        await self.service.drain()
        self._channel.send(Drained())

    def _begin(self) -> None:
        asyncio.get_running_loop().add_reader(self._connections, self._take)
        self._channel.send(Serving())

    def _take(self) -> None:
        """Serve one connection that the parent has accepted."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._connections, 1, 1)
        except (BlockingIOError, InterruptedError):
            return
        if not message:
            asyncio.get_running_loop().remove_reader(self._connections)
        elif not descriptors:  # this process is out of them, and the kernel has closed the connection
            self._channel.send(Closed())
        for descriptor in descriptors:
            self._begin_task(self._connect(socket.socket(fileno=descriptor)))

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client has left already
            connection.close()
            self._channel.send(Closed())

    def _protocol(self) -> asyncio.Protocol:
        """As uvicorn creates it for a port."""
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
