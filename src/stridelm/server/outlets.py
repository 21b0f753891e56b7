"""The engine process's sockets to those who get its output: the parent, and each front-end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import zmq

from stridelm.server.messages import Delta, FromEngine, Outputs, Report, encode, frontend_of

logger = logging.getLogger(__name__)


class Outlets:
    """parent: address of the process that started this one; its name is empty."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], parent: str) -> None:
        self._context = context
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._ended: set[str] = set()
        """Names of front-ends that have ended: one whose messages are still under way is not attached again."""
        self.attach("", parent)

    def __contains__(self, frontend: str) -> bool:
        return frontend in self._sockets

    def attach(self, frontend: str, address: str) -> None:
        """Send this front-end's output to this address from now on."""
        if frontend in self._ended or frontend in self._sockets:
            return
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)  # a step never waits for a reader
        socket.connect(address)
        self._sockets[frontend] = socket

    def detach(self, frontend: str) -> None:
        """Drop what a front-end that has ended has not read."""
        self._ended.add(frontend)
        socket = self._sockets.pop(frontend, None)
        if socket is not None:
            socket.close(linger=0)

    def send(self, frontend: str, message: FromEngine) -> None:
        """Never blocks. A message to a front-end that has ended is dropped."""
        socket = self._sockets.get(frontend)
        if socket is not None:
            socket.send(encode(message))

    def emit(self, deltas: Sequence[Delta], report: Report | None = None) -> None:
        """A step's output, as one message to each front-end that has some of it; the report goes to the parent."""
        shares: dict[str, list[Delta]] = {} if report is None else {"": []}
        for delta in deltas:
            shares.setdefault(frontend_of(delta.id), []).append(delta)
        for frontend, share in shares.items():
            self.send(frontend, Outputs(share, None if frontend else report))
