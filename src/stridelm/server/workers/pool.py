"""The server's side of its workers: admission, time limits, and killing a worker whose client leaves.

A task is first tried in the quick lane. If it does not finish in time, it starts over in the slow lane: so a task that
never finishes delays quick ones by at most the quick lane's time. In both, tenants take turns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from stridelm.server.errors import ApiError, too_many, unavailable
from stridelm.server.fair_line import Lane, LineFull
from stridelm.server.nurseries import start_nursery
from stridelm.server.workers.nursery import HEAD, PID

START_S = 60.0
"""How long the nursery may take to start, before its first worker."""
BUFFER = 1 << 20


class TookTooLong(Exception):
    """The task was not done in time."""


class Died(Exception):
    """The worker ended before the task was done: it took too much memory, or crashed."""


class TimedLane(Lane):
    """places: concurrent workers. waiting: maximum tasks of one tenant that wait for a place. seconds: time limit of
    each task."""

    def __init__(self, places: int, waiting: int, seconds: float) -> None:
        super().__init__(places, waiting)
        self.waiting, self.seconds = waiting, seconds


class Pool:
    """Workers of one kind. opening: the argument of the kind's `prepare`. what: the tasks' name, for errors."""

    def __init__(self, kind: str, opening: bytes, what: str, quick: TimedLane, slow: TimedLane) -> None:
        self._kind, self._opening, self._what = kind, opening, what
        self._quick, self._slow = quick, slow
        self._nursery: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the nursery, so that the first task need not wait for it. Raises OSError if it cannot be started."""
        await self._started()

    async def do(self, tenant: str, *task: bytes) -> bytes:
        """The result of a tenant's task, which may be given in parts. If cancelled, the worker is killed at once.

        Raises TookTooLong, Died, or ApiError if too many of the tenant's tasks wait or no worker can be started.
        """
        with suppress(TookTooLong):
            return await self._in(self._quick, tenant, task)
        return await self._in(self._slow, tenant, task)

    async def close(self) -> None:
        """End the nursery, and with it its workers."""
        if self._control is not None:
            self._control.close()
        if self._nursery is not None and self._nursery.returncode is None:
            self._nursery.kill()
            await self._nursery.wait()

    async def _in(self, lane: TimedLane, tenant: str, task: Sequence[bytes]) -> bytes:
        try:
            async with lane.place(tenant):
                return await self._try(task, lane.seconds)
        except LineFull:
            raise too_many(lane.waiting, self._what, max(1, round(lane.seconds))) from None

    async def _try(self, task: Sequence[bytes], seconds: float) -> bytes:
        async with self._worker() as (reader, writer):
            writer.write(HEAD.pack(sum(map(len, task)), seconds + 1.0))
            for part in task:
                writer.write(part)
            try:
                return await asyncio.wait_for(_receive_result(reader), seconds)
            except asyncio.TimeoutError:
                raise TookTooLong from None
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise Died from error

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection to a new worker, which is killed on exit."""
        ours, theirs = socket.socketpair()
        with theirs:
            control = await self._started()
            try:
                socket.send_fds(control, [b"w"], [theirs.fileno()])
            except OSError as error:  # the nursery has died, or has hundreds of workers to start
                ours.close()
                raise self._missing() from error
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=BUFFER)
        process: int | None = None
        try:
            try:
                [pid] = PID.unpack(await asyncio.wait_for(reader.readexactly(PID.size), START_S))
                process = os.pidfd_open(pid)
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
                raise self._missing() from error
            yield reader, writer
        finally:
            if process is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)
            writer.transport.abort()

    def _missing(self) -> ApiError:
        return unavailable(f"no worker for {self._what} could be started; see the server's log if this goes on")

    async def _started(self) -> socket.socket:
        """The nursery's socket; starts the nursery if it is not running."""
        async with self._starting:
            if self._control is None or self._nursery is None or self._nursery.returncode is not None:
                self._nursery, ours = await start_nursery(
                    "stridelm.server.workers.nursery", self._kind, opening=self._opening
                )
                if self._control is not None:
                    self._control.close()
                self._control = ours
            return self._control


async def _receive_result(reader: asyncio.StreamReader) -> bytes:
    size, _ = HEAD.unpack(await reader.readexactly(HEAD.size))
    return await reader.readexactly(size)
