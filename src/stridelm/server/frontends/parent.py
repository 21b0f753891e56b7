"""The parent of several front-end processes and the engine: it listens on the port and serves no request itself.

                connections, control                ZeroMQ
port --> parent --------------------> front-end 1 <--------> engine
           |   \\--------------------> front-end 2 <-------->   |
           \\--- starts, watches, restarts, heartbeat, reports --/
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict

from stridelm.config import EngineConfig
from stridelm.options import flat
from stridelm.run.malloc import share_arenas
from stridelm.server.config import ServerConfig
from stridelm.server.errors import ApiError
from stridelm.server.frontends.door import Door
from stridelm.server.frontends.fleet import Fleet, Member
from stridelm.server.frontends.messages import (
    AbortSamples,
    AllMetrics,
    Drain,
    EngineState,
    FromFrontend,
    Heard,
    MetricsWanted,
    Opening,
    SnapshotTaken,
)
from stridelm.server.frontends.totals import Totals
from stridelm.server.listen import address_of, listen
from stridelm.server.logs import ACCESS
from stridelm.server.messages import Detach, Ready, Report
from stridelm.server.metrics import Metrics
from stridelm.server.signals import stoppable
from stridelm.server.supervisor import Supervisor

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often the parent looks whether there is something to tell of the engine."""
LEAVE_S = 8.0
"""How long front-ends may take to send the last events of streams and to end."""


async def serve(config: ServerConfig, engine: EngineConfig, announce: Callable[[Ready, str], None]) -> None:
    """Serve until a signal, with config.api_server_count front-ends. `announce` is called with the engine's facts and
    the address once requests are served.

    Raises ValueError for a configuration that cannot be served, RuntimeError if the engine or the front-ends cannot be
    loaded, OSError for an address that cannot be listened on.
    """
    share_arenas()
    with listen(config.host, config.port) as listener:  # before anything is loaded: a taken port is reported at once
        parent = Parent(config, engine)
        door = Door(listener, parent.fleet)
        working = []
        try:
            ready = await parent.start()
            door.listen()
            working = [asyncio.create_task(_lasting(work)) for work in (door.serve, parent.watch)]
            announce(ready, address_of(listener))
            await parent.signalled()
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            listener.close()
            await parent.stop()


async def _lasting(work: Callable[[], Awaitable[None]]) -> None:
    """Do work that never ends, and begin again if it fails."""
    while True:
        try:
            await work()
        except Exception:
            logger.critical("a task of the parent process failed; restarting it", exc_info=True)
            await asyncio.sleep(LOOK_S)


class Parent:
    def __init__(self, config: ServerConfig, engine: EngineConfig) -> None:
        assert config.api_server_count is not None
        self._metrics = Metrics(config.names_of(engine.model)[0])
        self._supervisor = Supervisor(
            engine,
            config.max_restarts,
            config.engine_timeout,
            watch=lambda *_: None,  # the parent has no requests
            heard=self._on_report,
            gone=self._on_engine_lost,
            restarted=self._on_engine_restarted,
            log_json=config.log_json,
            limits=config.draft_limits,
            kv_events=config.kv_events,
        )
        opening = Opening(
            server=asdict(config),
            engine=flat(engine),
            salt=secrets.token_hex(16),
            log_level=logging.getLogger().level,
            access_level=ACCESS.level,
        )
        self.fleet = Fleet(
            config.api_server_count,
            opening,
            self._supervisor.directory,
            joined=self._on_joined,
            heard=self._on_message,
            left=self._on_left,
            restarted=self._metrics.frontend_restarted,
        )
        self._totals = Totals(self._metrics, self.fleet)
        self._told: EngineState | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._force = False

    async def start(self) -> Ready:
        """Load the engine and the front-ends. Raises what `serve` does."""
        with stoppable():
            ready = await self._load()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        return ready

    async def _load(self) -> Ready:
        loading = asyncio.create_task(self.fleet.load())
        try:
            engine = asyncio.create_task(self._supervisor.start())
            try:
                await asyncio.gather(loading, engine)
            finally:
                engine.cancel()
                await asyncio.gather(engine, return_exceptions=True)
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        await self.fleet.start()
        return engine.result()

    async def watch(self) -> None:
        """Tell the front-ends of every change of the engine's state that no callback has reported."""
        while True:
            self._tell_state()
            await asyncio.sleep(LOOK_S)

    async def signalled(self) -> None:
        """Wait for a signal, and until the running requests have ended, or for another signal."""
        await self._done.wait()

    async def stop(self) -> None:
        """End all processes."""
        if self._draining is not None:
            self._draining.cancel()
        await self.fleet.stop(self._force, LEAVE_S)
        await self._supervisor.stop()

    def _on_signal(self, number: int) -> None:
        """The first signal drains, the second does not wait."""
        if self._draining is not None:
            self._force = True
            self._done.set()
            return
        logger.warning("%s: waiting for running requests to finish", signal.Signals(number).name)
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        self.fleet.stop_restarting()
        self.fleet.tell(Drain())
        await self.fleet.until(lambda: all(member.drained for member in self.fleet.members))
        self._done.set()

    # The engine

    def _on_report(self, report: Report) -> None:
        self._metrics.heard(report)
        self.fleet.tell(Heard(report))

    def _on_engine_lost(self) -> None:
        self._metrics.engine_down()
        self._tell_state()

    def _on_engine_restarted(self) -> None:
        self._metrics.restarted()
        self._tell_state()

    def _tell_state(self) -> None:
        if self._supervisor.ready is None:
            return  # it could not be loaded at all: there are no front-ends yet
        state = self._state()
        if state != self._told:
            self._told = state
            self.fleet.tell(state)

    def _state(self) -> EngineState:
        inbox, ready = None, self._supervisor.ready
        assert ready is not None
        with suppress(ApiError):
            inbox = self._supervisor.engine_client.to_engine
        return EngineState(ready, inbox, self._supervisor.why_unhealthy)

    # Front-ends

    def _on_joined(self, member: Member) -> None:
        member.channel.send(self._state())
        if self._draining is not None:
            member.channel.send(Drain())

    def _on_message(self, member: Member, message: FromFrontend) -> None:
        if isinstance(message, SnapshotTaken):
            self._totals.take(member, message)
        elif isinstance(message, MetricsWanted):
            task = asyncio.get_running_loop().create_task(self._send_metrics(member, message.number))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            assert isinstance(message, AbortSamples)
            self.fleet.tell(message, besides=member)

    def _on_left(self, member: Member) -> None:
        self._totals.left(member)
        with suppress(ApiError):  # an engine that is down has forgotten it anyway
            self._supervisor.engine_client.send(Detach(member.name))

    async def _send_metrics(self, member: Member, number: int) -> None:
        member.channel.send(AllMetrics(number, await self._totals.snapshots()))
