"""Messages that arrive at a ZeroMQ socket, on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import zmq

from stridelm.server.turns import SLICE_S


class Inbox:
    """Calls `take` with every message that arrives at the socket, and does the work that it returns, all in slices.

    take: returns the work as an iterator of small steps. The socket's descriptor becomes readable when messages arrive
    at an empty socket, and not again before the socket has been read empty: so a slice that leaves messages behind
    schedules the next one itself.
    """

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[bytes], Iterator[None]]) -> None:
        self._socket, self._take = socket, take
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._next: asyncio.Handle | None = None
        self._work: Iterator[None] = iter(())
        self.reading: asyncio.Future[None] = self._loop.create_future()
        """Never done by itself; if `take` or the socket fails, it has the error, and nothing more is received."""
        self._loop.add_reader(self._descriptor, self._read)
        self._next = self._loop.call_soon(self._read)  # messages may have arrived before

    def close(self) -> None:
        """Receive nothing more. The socket itself stays open."""
        self._loop.remove_reader(self._descriptor)
        if self._next is not None:
            self._next.cancel()
        self.reading.cancel()

    def _read(self) -> None:
        self._next = None
        until = time.perf_counter() + SLICE_S
        try:
            while time.perf_counter() < until:
                if next(self._work, self) is not self:
                    continue
                try:
                    self._work = self._take(self._socket.recv(zmq.NOBLOCK))
                except zmq.Again:
                    return
            self._next = self._loop.call_soon(self._read)
        except Exception as error:
            self._loop.remove_reader(self._descriptor)
            if not self.reading.done():
                self.reading.set_exception(error)
