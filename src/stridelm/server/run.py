"""Starts the server from its configuration: one HTTP process, the parent of the engine's.

The engine loads while this process imports what serves requests, which takes both of them seconds; nothing that takes
long to import may be imported above. With several front-end processes, `frontends.parent` takes this file's place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from stridelm.config import EngineConfig
from stridelm.run.malloc import share_arenas
from stridelm.server.config import ServerConfig
from stridelm.server.listen import address_of, listen
from stridelm.server.messages import Ready
from stridelm.server.metrics import Metrics
from stridelm.server.signals import stoppable
from stridelm.server.supervisor import Supervisor

if TYPE_CHECKING:
    from stridelm.server.alone import Server


async def serve(config: ServerConfig, engine: EngineConfig, announce: Callable[[Ready, str], None]) -> None:
    """Serve until a signal. `announce` is called with the engine's facts and the address once requests are served.

    Raises ValueError for a configuration that cannot be served, RuntimeError if the engine cannot be loaded, OSError
    for an address that cannot be listened on.
    """
    share_arenas()
    server = None
    with listen(config.host, config.port) as listener:  # before anything is loaded: a taken port is reported at once
        metrics = Metrics(config.names_of(engine.model)[0])
        supervisor = supervised(config, engine, metrics)

        def begun() -> None:
            assert supervisor.ready is not None
            announce(supervisor.ready, address_of(listener))

        try:
            with stoppable():
                server = await loaded(supervisor, partial(_load, config, engine, metrics, begun))
            await server.serve(sockets=[listener])
        finally:
            if server is not None:
                await server.service.stop()
            await supervisor.stop()


def supervised(config: ServerConfig, engine: EngineConfig, metrics: Metrics) -> Supervisor:
    """The supervisor of an engine whose only server has these metrics."""
    return Supervisor(
        engine,
        config.max_restarts,
        config.engine_timeout,
        watch=metrics.watch,
        heard=metrics.heard,
        gone=metrics.engine_down,
        restarted=metrics.restarted,
        log_json=config.log_json,
        limits=config.draft_limits,
        kv_events=config.kv_events,
    )


async def loaded(supervisor: Supervisor, load: Callable[[], Server]) -> Server:
    """What `load` makes, in a thread, while the engine loads; connected to it. Raises what `serve` does."""
    starting = asyncio.create_task(supervisor.start())
    try:
        server = await asyncio.to_thread(load)
        await starting
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    server.service.connect(supervisor)
    return server


def _load(config: ServerConfig, engine: EngineConfig, metrics: Metrics, begun: Callable[[], None]) -> Server:
    from stridelm.server.alone import Server  # takes seconds: see the module's docstring

    return Server(config, engine, metrics, begun)
