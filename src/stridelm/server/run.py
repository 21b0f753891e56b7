"""Starts the server from its configuration, and stops it on a signal: one HTTP process, the parent of the engine's.

With several front-end processes, `frontends.parent` takes this file's place.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from types import FrameType

from stridelm.config import EngineConfig
from stridelm.run.malloc import share_arenas
from stridelm.server.app import build_app
from stridelm.server.config import ServerConfig
from stridelm.server.http import HttpServer
from stridelm.server.limits import Limits
from stridelm.server.listen import address_of, listen
from stridelm.server.messages import Ready, Report
from stridelm.server.service import Service
from stridelm.server.supervisor import Supervisor

logger = logging.getLogger(__name__)


async def serve(config: ServerConfig, engine: EngineConfig, announce: Callable[[Ready, str], None]) -> None:
    """Serve until a signal. `announce` is called with the engine's facts and the address once requests are served.

    Raises ValueError for a configuration that cannot be served, RuntimeError if the engine cannot be loaded, OSError
    for an address that cannot be listened on.
    """
    share_arenas()
    service = Service(config, engine)
    supervisor = _supervisor(service)
    with listen(config.host, config.port) as listener:  # before the engine is loaded: a taken port is reported at once
        try:
            ready = await supervisor.start()
            service.connect(supervisor)
            await _Server(service, lambda: announce(ready, address_of(listener))).serve(sockets=[listener])
        finally:
            await service.stop()
            await supervisor.stop()


def _supervisor(service: Service) -> Supervisor:
    def heard(report: Report) -> None:
        service.report = report
        service.metrics.heard(report)

    def gone() -> None:
        service.report = None
        service.metrics.engine_down()

    config, metrics = service.config, service.metrics
    return Supervisor(
        service.engine_config,
        config.max_restarts,
        config.engine_timeout,
        watch=metrics.watch,
        heard=heard,
        gone=gone,
        restarted=metrics.restarted,
        log_json=config.log_json,
    )


class _Server(HttpServer):
    """A signal first lets running requests finish. `announce` is called once it listens."""

    def __init__(self, service: Service, announce: Callable[[], None]) -> None:
        super().__init__(service, build_app(service), Limits.of(service.config), announce)
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second does not wait."""
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        logger.warning("%s: waiting for running requests to finish", signal.Signals(sig).name)
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self.service.drain()
        self.should_exit = True
