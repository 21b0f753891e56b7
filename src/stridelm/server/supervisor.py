"""Keeps an engine process alive: starts it, notices when it dies, fails the requests that wait, and restarts it.

It survives failures of the machine: descriptors, memory or processes that have run out for a moment are available again
later. The task that does this is watched too, and restarted should it end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from stridelm.config import EngineConfig
from stridelm.options import flat
from stridelm.server.chunk import Chunk
from stridelm.server.draft_limits import DraftLimits
from stridelm.server.engine_client import EngineClient
from stridelm.server.errors import unavailable
from stridelm.server.generation import Generation
from stridelm.server.kv_events import KVEventsConfig
from stridelm.server.messages import Failed, Orders, Ready, Report, Stop
from stridelm.server.socket_directory import SocketDirectory

logger = logging.getLogger(__name__)

WINDOW_S = 600.0
"""Deaths longer ago than this do not count."""
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
STOPPING_S = 10.0
LOOKS = 10
"""Checks for a heartbeat within the time that an engine may be silent."""


class EngineFailed(RuntimeError):
    """The engine could not be loaded: another start would most likely end the same way."""


class Supervisor:
    """One engine process at a time. `watch` and `heard` are passed to each EngineClient; `gone` is called when an
    engine has ended, `restarted` when a new one is up."""

    def __init__(
        self,
        config: EngineConfig,
        max_restarts: int,
        timeout_s: float,
        watch: Callable[[Generation, int, Chunk, float], None],
        heard: Callable[[Report], None],
        gone: Callable[[], None],
        restarted: Callable[[], None],
        log_json: bool = False,
        limits: DraftLimits | None = None,
        kv_events: KVEventsConfig | None = None,
    ) -> None:
        """Raises ValueError if temporary files have no place where sockets can be."""
        self.config = config
        self.ready: Ready | None = None
        """What the engine reported when it was last loaded."""
        self.why_down: str | None = "the engine is being loaded"
        """None while it is up."""
        self.report: Report | None = None
        """The engine's last one; None while there is no engine."""
        self._max_restarts, self._timeout_s = max_restarts, timeout_s
        self._watch, self._heard, self._log_json = watch, heard, log_json
        self._limits, self._kv_events = limits, kv_events
        self._gone, self._restarted = gone, restarted
        self._deaths: deque[float] = deque()
        self._sockets = SocketDirectory()
        self.directory = self._sockets.path
        self._context = zmq.Context()
        self._engine_client: EngineClient | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def engine_client(self) -> EngineClient:
        """Raises ApiError while there is no engine."""
        if self._engine_client is None or self.why_down is not None:
            raise unavailable(self.why_down or "the engine is not running")
        return self._engine_client

    @property
    def why_unhealthy(self) -> str | None:
        """Why the engine cannot be relied on now: it is down, or the task that watches it is."""
        if self.why_down is None and self._keeping is not None and self._keeping.done():
            return "the task that watches the engine stopped and is being restarted"
        return self.why_down

    @property
    def pid(self) -> int | None:
        """The engine's process id, if there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> Ready:
        """Load the engine and keep it alive from then on. Raises ValueError if it refuses its options, RuntimeError if
        it cannot be loaded for another reason."""
        ready = await self._start_process()
        self._keep_watch()
        return ready

    async def stop(self) -> None:
        """End the engine, and fail whatever waits for it."""
        self._stopping = True
        self.why_down = "the server is shutting down"
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._engine_client is not None:
            self._engine_client.send(Stop())
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), STOPPING_S)
            except asyncio.TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._drop_link()
        self._context.destroy(linger=0)
        self._sockets.remove()

    async def _start_process(self) -> Ready:
        """Start the engine; on any exception, clean up everything that was started."""
        try:
            return await self._load()
        except BaseException:
            await self._end_process()
            await self._drop_link()
            raise

    async def _load(self) -> Ready:
        self._engine_client = engine_client = EngineClient(self.directory, self._watch, self._on_report, self._context)
        orders = Orders(
            config=flat(self.config),
            inbox=engine_client.to_engine,
            outbox=engine_client.from_engine,
            parent=os.getpid(),
            log_level=logging.getLogger().level,
            log_json=self._log_json,
            limits=self._limits,
            kv_events=self._kv_events,
        )
        command = (sys.executable, "-m", "stridelm.server.engine_process")
        # In a session of its own, so that Ctrl-C reaches only the HTTP process.
        self._process = process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(orders))
        process.stdin.close()
        died = asyncio.create_task(process.wait())
        either: set[asyncio.Future[Any]] = {died, engine_client.ready}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not engine_client.ready.done():
                raise EngineFailed(f"the engine's process ended with code {died.result()} before it was loaded")
            result = engine_client.ready.result()
            if isinstance(result, Failed):
                await died
                raise (ValueError if result.user_error else EngineFailed)(result.message)
        finally:
            died.cancel()
        self.ready, self.why_down = result, None
        return result

    def _on_report(self, report: Report) -> None:
        self.report = report
        self._heard(report)

    async def _end_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _keep_watch(self) -> None:
        """Start the task that keeps the engine alive, and restart it should it end."""
        if self._stopping:
            return
        self._keeping = asyncio.create_task(self._keep())
        self._keeping.add_done_callback(self._keeper_ended)

    def _keeper_ended(self, task: asyncio.Task[None]) -> None:
        if self._stopping:
            return
        error = None if task.cancelled() else task.exception()
        logger.critical("the task that watches the engine ended; restarting it", exc_info=error)
        task.get_loop().call_later(BACKOFF_S, self._keep_watch)

    async def _keep(self) -> None:
        """Wait for the process to die, and restart it, as often as is allowed."""
        while True:
            if self._process is not None:
                code = await self._ended(self._process)
                self.why_down = "the engine stopped and is being restarted"
                logger.error("the engine's process ended with code %d", code)
                self._process = None
                self._note_death()
            await self._drop_link()
            failures = 0
            while not await self._restart(failures):
                failures += 1

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """The exit code of the process once it has ended. A process that falls silent is killed."""
        listening = (
            None
            if self._engine_client is None
            else asyncio.ensure_future(self._end_if_silent(process, self._engine_client))
        )
        try:
            return await process.wait()
        finally:
            if listening is not None:
                listening.cancel()

    async def _end_if_silent(self, process: asyncio.subprocess.Process, engine_client: EngineClient) -> None:
        """Kill the process when its loop sends no heartbeat for too long, or when its messages are no longer received.

        Checks are counted instead of seconds, so that after a suspend of the machine, or of this process, the engine
        does not seem to have hung.
        """
        silent, before = 0, engine_client.beats
        while silent < LOOKS and not engine_client.reading.done():
            await asyncio.wait({engine_client.reading}, timeout=self._timeout_s / LOOKS)
            silent = silent + 1 if engine_client.beats == before else 0
            before = engine_client.beats
        if engine_client.reading.done():
            error = None if engine_client.reading.cancelled() else engine_client.reading.exception()
            logger.error("messages of the engine can no longer be received; killing it", exc_info=error)
        else:
            logger.error("the engine has made no step for %g s (engine_timeout); killing it", self._timeout_s)
        process.kill()

    def _note_death(self) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - WINDOW_S:
            self._deaths.popleft()

    async def _restart(self, failures: int) -> bool:
        """Try to restart the engine; whether it is up again. Waits longer after each death and each failed start.

        An engine that dies too often stays down. If the machine could not start the process, it is tried without limit,
        since a later start may well succeed.
        """
        if len(self._deaths) > self._max_restarts:
            self.why_down = "the engine stopped too often and is not started again; see the server's log"
            logger.critical("the engine died %d times in %g s and is not restarted", len(self._deaths), WINDOW_S)
            await asyncio.get_running_loop().create_future()  # until stop
        doublings = min(max(len(self._deaths), 1) - 1 + failures, 10)
        await asyncio.sleep(min(BACKOFF_S * 2**doublings, MAX_BACKOFF_S))
        try:
            await self._start_process()
        except (ValueError, EngineFailed):
            logger.exception("the engine could not be restarted")
            self._note_death()
            return False
        except Exception as error:
            why = (error.strerror if isinstance(error, OSError | zmq.ZMQError) else None) or type(error).__name__
            self.why_down = f"the engine stopped and could not be restarted yet ({why}); trying again"
            logger.exception("the engine's process could not be started; trying again")
            return False
        self._restarted()
        logger.warning("the engine was restarted")
        return True

    async def _drop_link(self) -> None:
        engine_client, self._engine_client = self._engine_client, None
        if engine_client is not None:
            engine_client.fail_all()
            engine_client.close()
            self.report = None
            self._gone()
