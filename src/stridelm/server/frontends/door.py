"""The port: accepts connections, and hands each to the front-end that has fewest.

The kernel could spread connections over processes that listen at the same port (SO_REUSEPORT), but by a hash: with a
few dozen long streams one process would get twice as many as another, and those that wait at a process that dies are
lost.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket

from stridelm.server.frontends.fleet import Fleet

logger = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that wait to be accepted, as uvicorn has it."""
RETRY_S = 0.01


class Door:
    """listener: bound, not listening yet."""

    def __init__(self, listener: socket.socket, fleet: Fleet) -> None:
        self._listener, self._fleet = listener, fleet
        self._turns = itertools.count(1)

    def listen(self) -> None:
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)

    async def serve(self) -> None:
        """Until cancelled. While no front-end serves, connections wait in the backlog."""
        loop = asyncio.get_running_loop()
        while True:
            await self._fleet.until(lambda: bool(self._fleet.serving))
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors, or the client has left already
                logger.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while not self._hand_over(connection):
                    await asyncio.sleep(RETRY_S)

    def _hand_over(self, connection: socket.socket) -> bool:
        """Give the connection to the front-end that has fewest, among these to the one whose turn was longest ago;
        whether one could take it."""
        for member in sorted(self._fleet.serving, key=lambda one: (one.open, one.last_turn)):
            try:
                socket.send_fds(member.line, [b"c"], [connection.fileno()])
            except OSError:  # it has just ended, or hangs with hundreds that it has not taken yet
                continue
            member.open += 1
            member.last_turn = next(self._turns)
            return True
        return False
