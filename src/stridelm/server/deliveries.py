"""Hands what arrives to its readers, without a task for each.

A step's output reaches every open request. To wake a task for each costs as much as the event that it sends, so the
loop itself calls the readers: those with something new, one after the other, in slices. What arrives for a request
while it waits is put together, so that load makes events larger rather than later.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from stridelm.server.turns import SLICE_S


class Delivery(Protocol):
    due: bool
    """Whether it is queued; set by Deliveries."""

    def advance(self) -> bool:
        """Do a bounded piece of work. Returns whether there is more that could be done now."""


class Deliveries:
    """The queue of one loop."""

    def __init__(self) -> None:
        self._queue: deque[Delivery] = deque()
        self._running = False

    def add(self, delivery: Delivery) -> None:
        """Let it advance soon."""
        if not delivery.due:
            delivery.due = True
            self._queue.append(delivery)
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        """One slice. A delivery that could go on waits for all others."""
        until = time.perf_counter() + SLICE_S
        queue = self._queue
        try:
            while queue and time.perf_counter() < until:
                delivery = queue.popleft()
                delivery.due = False
                if delivery.advance() and not delivery.due:
                    delivery.due = True
                    queue.append(delivery)
        finally:
            self._running = bool(queue)
            if queue:
                asyncio.get_running_loop().call_soon(self._run)
