"""Long work on the loop, in slices: what cannot be given to another process because its result is large.

One slice is at work at a time, whoever it belongs to, and then the loop goes round: others wait for a slice, however
many large answers are made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
SLICE_S = 0.003
FEW = 16


class Turns:
    """All the long work of one loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def __call__(self) -> Turn:
        """`async with turns() as turn`: what is done inside is one piece of long work."""
        return Turn(self._lock)


async def in_turns(turns: Turns, items: Sequence[T], make: Callable[[T], bytes]) -> bytes:
    """What is made of each, put together. A few are made at once, as each step's are."""
    if len(items) <= FEW:
        return b"".join(map(make, items))
    made = []
    async with turns() as turn:
        for item in items:
            made.append(make(item))
            await turn.breathe()
    return b"".join(made)


class Turn:
    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._holding = False
        self._began = 0.0

    async def __aenter__(self) -> Turn:
        await self._take()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._holding:
            self._lock.release()

    async def breathe(self) -> None:
        """To be called every millisecond or so: lets others go on if the slice is over."""
        if time.perf_counter() - self._began < SLICE_S:
            return
        self._holding = False
        self._lock.release()
        await asyncio.sleep(0)
        await self._take()

    async def _take(self) -> None:
        await self._lock.acquire()
        self._holding = True
        self._began = time.perf_counter()
