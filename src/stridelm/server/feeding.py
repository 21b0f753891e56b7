"""Received bytes on their way to the parsers, in turns: however many connections receive, and however much work each
byte makes, the loop spends no more than a slice on it between two of its iterations."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

PIECE = 16 << 10
"""Bytes that a parser gets at once."""
SLICE_S = 0.001


class Fed(Protocol):
    """What the feeder needs of a connection."""

    def feed(self) -> bool:
        """Parse a piece of what was received. Whether more is left."""


class Feeder:
    """The turns of all connections of a server."""

    def __init__(self) -> None:
        self._waiting: deque[Fed] = deque()
        self._called = False

    def add(self, connection: Fed) -> None:
        """Feed a connection that is not waiting yet, soon."""
        self._waiting.append(connection)
        self._call()

    def _call(self) -> None:
        if self._waiting and not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._called, until = False, time.perf_counter() + SLICE_S
        try:
            while self._waiting:
                connection = self._waiting.popleft()
                if connection.feed():
                    self._waiting.append(connection)
                if time.perf_counter() > until:
                    break
        finally:
            self._call()
