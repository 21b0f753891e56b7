"""Checks whether the engine generates, with one probe for all concurrent requests and for those shortly after.

/health_generate needs no key and does not count against the queue, so that a full server still counts as alive. So its
cost must be bounded: at most one token at a time is generated for all of them.
"""

from __future__ import annotations

import asyncio
import time

from stridelm.params import SamplingParams
from stridelm.server.engine_client import EngineClient, Prompt
from stridelm.server.errors import unavailable
from stridelm.server.gather import gather
from stridelm.server.messages import packed
from stridelm.server.service import Service

PROBE_S = 20.0
POLL_S = 0.02
FRESH_S = 1.0
"""How long a success is valid. A failure goes only to those who waited for it, and the next request tries again."""


class Probe:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: asyncio.Task[None] | None = None
        self._passed = float("-inf")

    async def check(self) -> None:
        """Raises ApiError unless the engine gave a sign of life within the last FRESH_S, or gives one now."""
        if time.monotonic() - self._passed < FRESH_S:
            return
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
            self._running.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # retrieve the exception even if every client has left
        await asyncio.shield(self._running)  # a client that leaves must not cancel it for the others

    async def _run(self) -> None:
        signs = [
            asyncio.ensure_future(sign) for sign in (_one_token(self._service.engine_client), self._another_step())
        ]
        try:
            seen, _ = await asyncio.wait(signs, timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED)
            for sign in seen:
                sign.result()  # raises if the engine died
        finally:
            for sign in signs:
                sign.cancel()
            await asyncio.gather(*signs, return_exceptions=True)
        if not seen:
            raise unavailable(f"the engine gave no sign of life for {PROBE_S:g} s")
        self._passed = time.monotonic()

    async def _another_step(self) -> None:
        before = self._steps
        while self._steps <= before:
            await asyncio.sleep(POLL_S)

    @property
    def _steps(self) -> int:
        report = self._service.report
        return 0 if report is None else report.stats.steps


async def _one_token(engine_client: EngineClient) -> None:
    generation = await engine_client.submit([Prompt(packed([0]), SamplingParams(max_tokens=1, temperature=0.0))])
    try:
        await gather(generation)
    finally:
        engine_client.abandon(generation)
