"""Hands what arrives to its readers, without a task for each.

A step's output reaches every open request. To wake a task for each costs as much as the event that it sends, so the
loop itself calls the readers: those with something new, tenants in turn, in slices. What arrives for a request while it
waits is put together, so that load makes events larger rather than later.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from stridelm.server.fair_line import FairLine
from stridelm.server.turns import SLICE_S


class Delivery(Protocol):
    tenant: str
    due: bool
    """Whether it is queued; set by Deliveries."""

    def advance(self) -> bool:
        """Do a bounded piece of work. Returns whether there is more that could be done now."""


class Deliveries:
    """The queue of one loop."""

    def __init__(self) -> None:
        self._line: FairLine[Delivery] = FairLine(places=None)
        self._running = False

    def add(self, delivery: Delivery) -> None:
        """Let it advance soon."""
        if not delivery.due:
            delivery.due = True
            self._line.join(delivery.tenant, delivery)
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        """One slice. A delivery that could go on waits for all others of its tenant."""
        until, line = time.perf_counter() + SLICE_S, self._line
        try:
            while time.perf_counter() < until and (served := line.next()) is not None:
                tenant, delivery = served
                delivery.due = False
                if delivery.advance() and not delivery.due:
                    delivery.due = True
                    line.join(tenant, delivery)
        finally:
            self._running = bool(line)
            if line:
                asyncio.get_running_loop().call_soon(self._run)
