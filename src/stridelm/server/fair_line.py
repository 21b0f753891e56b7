"""Lines in which tenants take turns: every queue of the server in which one client could make another wait.

A tenant's own items are served in order of arrival. Each place goes to the waiting tenant that has fewest places, and
among these to the one that was served longest ago. The number of items that may wait is limited for each tenant by
itself. So a tenant without items in a line can always join it, and waits at most for what runs now and for one item of
each other tenant, whatever the others send.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLine(Generic[T]):
    """places: items that may be out of the line and not finished; None for any number. waiting: items of one tenant
    that may wait; None for any number."""

    def __init__(self, places: int | None = 1, waiting: int | None = None) -> None:
        self._places, self._waiting = places, waiting
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()
        """Tenant -> its waiting items, at least one; the tenant that was served longest ago is first."""
        self._taken: Counter[str] = Counter()
        """Tenant -> its places, at least one."""

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._lines)

    def join(self, tenant: str, item: T) -> bool:
        """Let an item wait. Returns False if too many of this tenant's wait already."""
        line = self._lines.get(tenant)
        if line is None:
            self._lines[tenant] = deque((item,))
        elif self._waiting is not None and len(line) >= self._waiting:
            return False
        else:
            line.append(item)
        return True

    def leave(self, tenant: str, item: T) -> bool:
        """Stop waiting. Returns False if the item does not wait: it may have a place."""
        line = self._lines.get(tenant, ())
        if item not in line:
            return False
        self._lines[tenant].remove(item)
        if not self._lines[tenant]:
            del self._lines[tenant]
        return True

    def next(self, may: Callable[[str], bool] | None = None) -> tuple[str, T] | None:
        """Take the next item, and a place for it, which `finish` gives back; None if there is no item or no place.
        may: whether a tenant can be served now; by default any."""
        if self._places is None and may is None:
            tenant = next(iter(self._lines), None)  # the usual case is fast: it is the event loop's
        elif self._places is None or self._taken.total() < self._places:
            waiting = self._lines if may is None else filter(may, self._lines)
            tenant = min(waiting, key=self._taken.__getitem__, default=None)
        else:
            tenant = None
        if tenant is None:
            return None
        item = self._lines[tenant].popleft()
        if self._lines[tenant]:
            self._lines.move_to_end(tenant)
        else:
            del self._lines[tenant]
        if self._places is not None:
            self._taken[tenant] += 1
        return tenant, item

    def finish(self, tenant: str) -> None:
        """Give back a place."""
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]


class LineFull(Exception):
    """Too many of this tenant's tasks wait already."""


class Lane:
    """Places for coroutines, which tenants take in turn. As for FairLine."""

    def __init__(self, places: int = 1, waiting: int | None = None) -> None:
        self._line: FairLine[asyncio.Future[None]] = FairLine(places, waiting)

    async def enter(self, tenant: str) -> None:
        """Wait for a place, to be given back with `exit`. Raises LineFull."""
        turn = asyncio.get_running_loop().create_future()
        if not self._line.join(tenant, turn):
            raise LineFull
        self._serve()
        try:
            await turn
        except BaseException:
            if not self._line.leave(tenant, turn):  # it was given a place in the same moment
                self.exit(tenant)
            raise

    def exit(self, tenant: str) -> None:
        self._line.finish(tenant)
        self._serve()

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """`async with lane.place(tenant)`. Raises LineFull."""
        await self.enter(tenant)
        try:
            yield
        finally:
            self.exit(tenant)

    def _serve(self) -> None:
        while (served := self._line.next()) is not None:
            if not served[1].done():  # if it was cancelled, `enter` is about to give the place back
                served[1].set_result(None)
