"""A front-end's view of everything outside of it: the engine, and the other front-ends."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import zmq
from fastapi import FastAPI

from stridelm.server.callers import Caller
from stridelm.server.engine_client import EngineClient
from stridelm.server.errors import ApiError, unavailable
from stridelm.server.frontends.channel import Channel
from stridelm.server.frontends.messages import (
    AbortSamples,
    AllMetrics,
    EngineState,
    Heard,
    MetricsWanted,
    SnapshotTaken,
    SnapshotWanted,
    Start,
    ToFrontend,
    encode,
    snapshot_of,
)
from stridelm.server.messages import Ready, Report
from stridelm.server.metrics import Metrics
from stridelm.server.service import Service
from stridelm.server.sglang.rids import rids_of

METRICS_S = 5.0
"""How long the parent may take to add up all metrics."""


class ParentLink:
    """What the parent says, as the service's EngineLink and Peers."""

    def __init__(self, start: Start, service: Service, app: FastAPI, channel: Channel[ToFrontend]) -> None:
        self.ready: Ready | None = None
        self.why_unhealthy: str | None = "the engine is being loaded"
        self.report: Report | None = None
        self._start, self._service, self._app, self._channel = start, service, app, channel
        self._context = zmq.Context()
        self._engine_client: EngineClient | None = None
        self._numbers = itertools.count(1)
        self._metrics: dict[int, asyncio.Future[list[bytes]]] = {}

    # The service's EngineLink

    @property
    def engine_client(self) -> EngineClient:
        """Raises ApiError while there is no engine."""
        if self._engine_client is None:
            raise unavailable(self.why_unhealthy or "the engine is not running")
        return self._engine_client

    # The service's Peers

    @property
    def open_samples(self) -> int:
        """As of the engine's last report."""
        report = self.report
        return 0 if report is None else max(report.open - self._service.open_samples, 0)

    def abort(self, rid: str | None, caller: Caller) -> None:
        self._channel.send(AbortSamples(rid, caller))

    async def metrics(self) -> bytes:
        """Raises ApiError if the parent does not answer in time."""
        number = next(self._numbers)
        answer = self._metrics[number] = asyncio.get_running_loop().create_future()
        self._channel.send(MetricsWanted(number))
        try:
            snapshots = await asyncio.wait_for(answer, METRICS_S)
        except asyncio.TimeoutError:
            raise unavailable("the metrics of all processes could not be collected in time; try again") from None
        finally:
            del self._metrics[number]
        total = Metrics(self._service.names[0])
        for snapshot in snapshots:
            total.add(snapshot_of(snapshot))
        return total.render()

    # What the parent says

    def take(self, message: ToFrontend) -> None:
        if isinstance(message, EngineState):
            self._connect(message)
        elif isinstance(message, Heard):
            self.report = message.report
        elif isinstance(message, SnapshotWanted):
            self.send_snapshot(message.number)
        elif isinstance(message, AllMetrics):
            answer = self._metrics.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message.snapshots)
        else:
            assert isinstance(message, AbortSamples)
            with suppress(ApiError):  # no engine: there is nothing to abort
                self._abort_here(message)

    def send_snapshot(self, number: int = 0) -> None:
        self._channel.send(SnapshotTaken(number, encode(self._service.metrics.snapshot())))

    def close(self) -> None:
        self._disconnect()
        self._context.destroy(linger=0)

    def _connect(self, state: EngineState) -> None:
        self.ready, self.why_unhealthy = state.ready, state.why
        if self._engine_client is not None and self._engine_client.to_engine != state.inbox:
            self._disconnect()
        if self._engine_client is None and state.inbox is not None:
            self._engine_client = EngineClient(
                self._start.directory,
                watch=self._service.metrics.watch,
                heard=lambda report: None,  # reports come from the parent
                context=self._context,
                frontend=self._start.name,
                to_engine=state.inbox,
            )

    def _disconnect(self) -> None:
        """The engine is gone: all open requests fail."""
        engine_client, self._engine_client = self._engine_client, None
        self.report = None
        if engine_client is not None:
            engine_client.fail_all()
            engine_client.close()

    def _abort_here(self, message: AbortSamples) -> None:
        if message.rid is None:
            self._service.abort(message.caller)
        else:
            rids_of(self._app).abort(message.rid, message.caller)
