"""Starts the server from its configuration, and stops it on a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from stridelm.config import EngineConfig
from stridelm.run.malloc import TIDY_S, give_back_memory, share_arenas
from stridelm.server.app import build_app
from stridelm.server.config import ServerConfig
from stridelm.server.limits import Guard, Limits
from stridelm.server.protocol import protocol_for
from stridelm.server.service import Service

logger = logging.getLogger(__name__)

LAST_EVENTS_S = 5
"""Seconds left for sending the last events of streams once their requests have ended."""


async def serve(config: ServerConfig, engine: EngineConfig, announce: Callable[[Service, str], None]) -> None:
    """Serve until a signal. `announce` is called with the address once requests are served.

    Raises ValueError for a configuration that cannot be served, RuntimeError if the engine cannot be loaded, OSError
    for an address that cannot be listened on.
    """
    share_arenas()
    service = Service(config, engine)
    with listen(config.host, config.port) as listener:  # before the engine is loaded: a taken port is reported at once
        try:
            await service.supervisor.start()
            host, port = listener.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            await _Server(service, lambda: announce(service, address)).serve(sockets=[listener])
        finally:
            await service.stop()


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises ValueError if it cannot be bound."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sends small pieces at once (TCP_NODELAY) only if the protocol is given. Otherwise a body waits up to
        # 40 ms until its headers are acknowledged, and each token until the one before it is.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; choose another host or port") from error
    return listener


def _tidy() -> None:
    """Free the memory that requests left. Tracebacks form cycles with what they hold, such as bodies of megabytes, and
    a server without traffic allocates nothing that would trigger their collection."""
    gc.collect()
    give_back_memory()


class _Server(uvicorn.Server):
    """Uvicorn, except that a signal first lets running requests finish. `announce` is called once it listens."""

    def __init__(self, service: Service, announce: Callable[[], None]) -> None:
        self._guard = Guard(Limits.of(service.config))
        super().__init__(
            uvicorn.Config(
                build_app(service),
                http=protocol_for(self._guard),
                ws="none",
                timeout_keep_alive=service.config.timeout_keep_alive,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=LAST_EVENTS_S,
                server_header=False,
            )
        )
        self._service = service
        self._announce = announce
        self._draining: asyncio.Task[None] | None = None
        self._tidied = time.monotonic()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._announce()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second while it serves."""
        self._guard.sweep(self.server_state.connections)  # type: ignore[arg-type]
        now = time.monotonic()
        if now - self._tidied > TIDY_S:
            self._tidied = now
            asyncio.get_running_loop().run_in_executor(None, _tidy)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second does not wait."""
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        logger.warning("%s: waiting for running requests to finish", signal.Signals(sig).name)
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True
