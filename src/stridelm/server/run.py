"""Starts the server from its configuration: one HTTP process, the parent of the engine's.

The engine loads while this process imports what serves requests, which takes both of them seconds; nothing that takes
long to import may be imported above. With several front-end processes, `frontends.parent` takes this file's place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from stridelm.config import EngineConfig
from stridelm.run.malloc import share_arenas
from stridelm.server.chunk import Chunk
from stridelm.server.config import ServerConfig
from stridelm.server.generation import Generation
from stridelm.server.listen import address_of, listen
from stridelm.server.messages import Ready, Report
from stridelm.server.supervisor import Supervisor

if TYPE_CHECKING:
    from stridelm.server.alone import Server
    from stridelm.server.service import Service


async def serve(config: ServerConfig, engine: EngineConfig, announce: Callable[[Ready, str], None]) -> None:
    """Serve until a signal. `announce` is called with the engine's facts and the address once requests are served.

    Raises ValueError for a configuration that cannot be served, RuntimeError if the engine cannot be loaded, OSError
    for an address that cannot be listened on.
    """
    share_arenas()
    with listen(config.host, config.port) as listener:  # before anything is loaded: a taken port is reported at once
        running = Running(config, engine)
        try:
            ready = await running.start(lambda: announce(ready, address_of(listener)))
            await running.server.serve(sockets=[listener])
        finally:
            await running.stop()


class Running:
    """The engine's process and this one's server."""

    server: Server

    def __init__(self, config: ServerConfig, engine: EngineConfig) -> None:
        self._config, self._engine = config, engine
        self._service: Service | None = None
        """None until this process has imported it; what is heard until then is kept, since an idle engine reports
        once."""
        self._report: Report | None = None
        self._restarts = 0
        self._supervisor = Supervisor(
            engine,
            config.max_restarts,
            config.engine_timeout,
            watch=self._watch,
            heard=self._heard,
            gone=self._gone,
            restarted=self._restarted,
            log_json=config.log_json,
        )

    async def start(self, begun: Callable[[], None]) -> Ready:
        """begun: called once requests are served. Raises what `serve` does."""
        loading = asyncio.create_task(self._supervisor.start())
        try:
            self.server = await asyncio.to_thread(_load, self._config, self._engine, begun)
            self._tell(self.server.service)
            ready = await loading
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        self.server.service.connect(self._supervisor)
        return ready

    def _tell(self, service: Service) -> None:
        """Pass on what was heard before there was a service."""
        self._service = service
        for _ in range(self._restarts):
            self._restarted()
        if self._report is not None:
            self._heard(self._report)

    async def stop(self) -> None:
        if self._service is not None:
            await self._service.stop()
        await self._supervisor.stop()

    def _watch(self, generation: Generation, index: int, chunk: Chunk, now: float) -> None:
        if self._service is not None:
            self._service.metrics.watch(generation, index, chunk, now)

    def _heard(self, report: Report) -> None:
        self._report = report
        if self._service is not None:
            self._service.report = report
            self._service.metrics.heard(report)

    def _gone(self) -> None:
        self._report = None
        if self._service is not None:
            self._service.report = None
            self._service.metrics.engine_down()

    def _restarted(self) -> None:
        if self._service is None:
            self._restarts += 1
        else:
            self._service.metrics.restarted()


def _load(config: ServerConfig, engine: EngineConfig, begun: Callable[[], None]) -> Server:
    from stridelm.server.alone import Server  # takes seconds: see the module's docstring

    return Server(config, engine, begun)
