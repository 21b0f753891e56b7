"""The HTTP server of a process that has no others beside it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from types import FrameType

from stridelm.config import EngineConfig
from stridelm.server.app import build_app
from stridelm.server.config import ServerConfig
from stridelm.server.http import HttpServer
from stridelm.server.limits import Limits
from stridelm.server.metrics import Metrics
from stridelm.server.service import Service

logger = logging.getLogger(__name__)


class Server(HttpServer):
    """A signal first lets running requests finish. `begun` is called once it listens. Raises ValueError, on
    construction, for a configuration that cannot be served."""

    def __init__(self, config: ServerConfig, engine: EngineConfig, metrics: Metrics, begun: Callable[[], None]) -> None:
        service = Service(config, engine, metrics)
        super().__init__(service, build_app(service), Limits.of(config), begun)
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
