"""Keeps the front-end processes alive: starts them, notices when one ends or hangs, and starts another in its place."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from stridelm.server.frontends.channel import Channel
from stridelm.server.frontends.messages import (
    Closed,
    Drained,
    Exit,
    FromFrontend,
    Hello,
    Loaded,
    Opening,
    Serving,
    Start,
    ToFrontend,
    from_frontend,
)
from stridelm.server.nurseries import start_nursery

logger = logging.getLogger(__name__)

BACKOFF_S, MAX_BACKOFF_S = 0.1, 30.0
LASTING_S = 60.0
"""A front-end that has lived for so long failed for a reason of its own: the next one is started without delay."""
LOOK_S, LOOKS = 1.0, 60
"""A front-end that sends nothing, not even its heartbeat, at so many looks hangs, and is killed. Looks are counted
instead of seconds: after a suspend of the machine none seems to have hung."""
LARGEST_ANSWER = 1 << 16


@dataclass(eq=False)
class Member:
    """A front-end process, as the parent sees it."""

    name: str
    channel: Channel[FromFrontend]
    line: socket.socket
    """Takes the connections that are handed to it."""
    process: int | None = None
    """A pidfd."""
    pid: int = 0
    open: int = 0
    """Its connections."""
    last_turn: int = 0
    """When it was last handed a connection."""
    serving: bool = False
    drained: bool = False
    ended: bool = False
    silent: int = 0
    """Looks since its last message."""
    snapshot: bytes | None = None
    """Its metrics, as last told."""
    snapshot_number: int = 0
    """The last request for them that it has answered."""


@dataclass(eq=False)
class Fleet:
    """count: of front-ends. directory: for their sockets. joined: called with a new member, before it serves. heard:
    with each message that is not about its own state. left: once it has ended. restarted: once another serves in its
    place."""

    count: int
    opening: Opening
    directory: str
    joined: Callable[[Member], None]
    heard: Callable[[Member, FromFrontend], None]
    left: Callable[[Member], None]
    restarted: Callable[[], None]
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._nursery: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._names = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._failed = False
        """Whether one has ended or could not be started; of interest to `start` alone."""
        self._stopping = False

    async def load(self) -> None:
        """Start the nursery. Raises ValueError for a model that cannot be served."""
        await self._started()

    async def start(self) -> None:
        """Start all front-ends. Raises RuntimeError if one ends before all serve."""
        self._tasks = [asyncio.create_task(self._keep()) for _ in range(self.count)]
        self._tasks.append(asyncio.create_task(self._look()))
        await self.until(lambda: self._failed or len(self.serving) == self.count)
        if self._failed:
            raise RuntimeError("a front-end process ended before it served; the log says why")

    @property
    def serving(self) -> list[Member]:
        return [member for member in self.members if member.serving]

    def tell(self, message: ToFrontend, besides: Member | None = None) -> None:
        """Send to all front-ends but one."""
        for member in self.members:
            if member is not besides:
                member.channel.send(message)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until the condition, on the members' state, is true."""
        while not true():
            self._changed.clear()
            await self._changed.wait()

    def stop_restarting(self) -> None:
        """From now on a front-end that ends has done so for good."""
        self._stopping = True

    async def stop(self, force: bool, seconds: float) -> None:
        """End all front-ends, those that do not within this time by killing them."""
        self.stop_restarting()
        self.tell(Exit(force))
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.until(lambda: not self.members), 0 if force else seconds)
        for member in self.members:
            _kill(member)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._control is not None:
            self._control.close()
        if self._nursery is not None and self._nursery.returncode is None:
            self._nursery.kill()
            await self._nursery.wait()

    async def _keep(self) -> None:
        """Keep one front-end alive."""
        failures, again = 0, False
        while True:
            began = time.monotonic()
            try:
                await self._live(again)
            except asyncio.CancelledError:
                raise
            except Exception:
                logger.exception("a front-end process could not be started, or watched; trying again")
            if self._stopping:
                return
            again = self._failed = True
            self._changed.set()
            failures = 0 if time.monotonic() - began > LASTING_S else failures + 1
            if failures:
                await asyncio.sleep(min(BACKOFF_S * 2 ** min(failures - 1, 10), MAX_BACKOFF_S))

    async def _live(self, again: bool) -> None:
        """One front-end's life."""
        member = await self._spawn()
        self.members.append(member)
        try:
            member.channel.send(Start(member.name, self.directory))
            self.joined(member)
            async for message in member.channel.messages():
                member.silent = 0
                if isinstance(message, Serving) and again:
                    self.restarted()
                self._take(member, message)
        finally:
            member.serving, member.ended = False, True
            self.members.remove(member)
            _kill(member)
            if member.process is not None:
                os.close(member.process)
            member.channel.close()
            member.line.close()
            if not self._stopping:
                logger.error("front-end process %d ended; starting another", member.pid)
            self.left(member)
            self._changed.set()

    def _take(self, member: Member, message: FromFrontend) -> None:
        if isinstance(message, Hello):
            member.pid = message.pid
            member.process = os.pidfd_open(message.pid)
        elif isinstance(message, Serving):
            member.serving = True
        elif isinstance(message, Closed):
            member.open = max(member.open - 1, 0)
        elif isinstance(message, Drained):
            member.drained = True
        else:
            self.heard(member, message)
        self._changed.set()

    async def _look(self) -> None:
        """Kill front-ends that hang."""
        while True:
            await asyncio.sleep(LOOK_S)
            for member in self.members:
                member.silent += 1
                if member.silent > LOOKS:
                    logger.error("front-end process %d has hung for %g s; killing it", member.pid, LOOKS * LOOK_S)
                    _kill(member)
                    member.channel.close()  # one that has not even said which process it is

    async def _spawn(self) -> Member:
        """A new front-end. Raises OSError if the machine cannot start it now."""
        control = await self._started()
        ours, theirs = socket.socketpair()
        with theirs:
            line, other_end = socket.socketpair()
            with other_end:
                line.setblocking(False)
                try:
                    socket.send_fds(control, [b"f"], [theirs.fileno(), other_end.fileno()])
                    channel = await Channel.over(ours, from_frontend)
                except BaseException:
                    ours.close()
                    line.close()
                    raise
        return Member(str(next(self._names)), channel, line)

    async def _started(self) -> socket.socket:
        """The nursery's socket; starts the nursery if it is not running."""
        async with self._starting:
            if self._control is not None and self._nursery is not None and self._nursery.returncode is None:
                return self._control
            if self._control is not None:
                self._control.close()
            self._control = None
            self._nursery, ours = await start_nursery(
                "stridelm.server.frontends.nursery",
                opening=msgspec.json.encode(self.opening),
                kind=socket.SOCK_SEQPACKET,
            )
            try:
                answer = await asyncio.get_running_loop().sock_recv(ours, LARGEST_ANSWER)
                if not answer:
                    raise RuntimeError("the process that starts front-ends could not be loaded; the log says why")
                error = msgspec.json.decode(answer, type=Loaded).error
                if error is not None:
                    raise ValueError(error)
            except BaseException:
                ours.close()
                raise
            self._control = ours
            return ours


def _kill(member: Member) -> None:
    """At once, whatever it is doing."""
    if member.process is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(member.process, signal.SIGKILL)
