"""Long work on the event loop, in slices, for work whose result is too large to hand over from another process.

Only one slice runs between two turns of the loop, however many large answers are being made; the others wait, and
tenants take turns.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from stridelm.server.fair_line import Lane

SLICE_S = 0.003


class Turns:
    """The long work of one loop."""

    def __init__(self) -> None:
        self._lane = Lane()

    def __call__(self, tenant: str) -> Turn:
        """`async with turns(tenant) as turn`: the block is one piece of long work."""
        return Turn(self._lane, tenant)


class Turn:
    def __init__(self, lane: Lane, tenant: str) -> None:
        self._lane, self._tenant = lane, tenant
        self._holding = False
        self._began = 0.0

    async def __aenter__(self) -> Turn:
        await self._take()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._holding:
            self._lane.exit(self._tenant)

    async def breathe(self) -> None:
        """Call every millisecond or so: yields to the loop if the slice is over."""
        if time.perf_counter() - self._began < SLICE_S:
            return
        self._holding = False
        self._lane.exit(self._tenant)
        await asyncio.sleep(0)
        await self._take()

    async def _take(self) -> None:
        await self._lane.enter(self._tenant)
        self._holding = True
        self._began = time.perf_counter()
