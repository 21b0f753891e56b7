"""Work that anybody may ask for, done at a bounded rate: all who ask share the next result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")
REST, LONGEST_REST_S = 20, 1.0
"""After the work comes a rest of 20 times as long, a second at most: it takes no more than a twentieth of the time."""


class Shared(Generic[T]):
    """Calls `make` when somebody asks, once at a time, with rests."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._next: asyncio.Task[T] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._rests_until = 0.0

    async def get(self) -> T:
        """The result of work that begins after this call. Raises what `make` raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._work())
            self._next.add_done_callback(_retrieve)
        return await asyncio.shield(self._next)  # a client that leaves must not cancel it for the others

    async def _work(self) -> T:
        async with self._one_at_a_time:
            await asyncio.sleep(self._rests_until - time.monotonic())
            self._next = None
            began = time.monotonic()
            try:
                return await self._make()
            finally:
                now = time.monotonic()
                self._rests_until = now + min(REST * (now - began), LONGEST_REST_S)


def _retrieve(task: asyncio.Task[T]) -> None:
    """So that an error is not reported as unseen if every client has left."""
    if not task.cancelled():
        task.exception()
