"""Uvicorn's server as all of ours use it: with limits on connections, and tidied from time to time."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from stridelm.run.malloc import TIDY_S, give_back_memory
from stridelm.server.limits import Guard, Limits
from stridelm.server.protocol import protocol_for
from stridelm.server.service import Service

LAST_EVENTS_S = 5
"""Seconds left for sending the last events of streams once their requests have ended."""


class HttpServer(uvicorn.Server):
    """lost: called for each connection that is closed. begun: called once it serves."""

    def __init__(
        self,
        service: Service,
        app: FastAPI,
        limits: Limits,
        begun: Callable[[], None],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._guard = Guard(limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_for(self._guard, lost),
                ws="none",
                timeout_keep_alive=service.config.timeout_keep_alive,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=LAST_EVENTS_S,
                server_header=False,
            )
        )
        self.service = service
        self._begun = begun
        self._tidied = time.monotonic()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._begun()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second while it serves."""
        self._guard.sweep(self.server_state.connections)  # type: ignore[arg-type]
        now = time.monotonic()
        if now - self._tidied > TIDY_S:
            self._tidied = now
            asyncio.get_running_loop().run_in_executor(None, _tidy)
        return await super().on_tick(counter)


def _tidy() -> None:
    """Free the memory that requests left. Tracebacks form cycles with what they hold, such as bodies of megabytes, and
    a server without traffic allocates nothing that would trigger their collection."""
    gc.collect()
    give_back_memory()
