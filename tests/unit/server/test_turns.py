"""Work on the event loop that tenants take in turn."""

from __future__ import annotations

import asyncio
import time

from stridelm.server.deliveries import Deliveries
from stridelm.server.turns import SLICE_S, Turns


def test_long_answers_take_turns_by_tenant() -> None:
    """Beside a client that has thirty long answers made, another's of five slices is done before any of those: it gets
    every second slice, not every thirty-first."""
    done: list[str] = []

    async def work(turns: Turns, tenant: str, slices: int) -> None:
        async with turns(tenant) as turn:
            for _ in range(slices):
                until = time.perf_counter() + SLICE_S
                while time.perf_counter() < until:
                    pass
                await turn.breathe()
        done.append(tenant)

    async def run() -> None:
        turns = Turns()
        tasks = [asyncio.ensure_future(work(turns, "greedy", 10)) for _ in range(30)]
        await asyncio.sleep(0)
        await work(turns, "modest", 5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(work(turns, "modest", 1), 5)  # cancelled ones keep no turn

    asyncio.run(run())
    assert done[0] == "modest"


class Reader:
    due = False

    def __init__(self, tenant: str, log: list[str], times: int) -> None:
        self.tenant, self._log, self._times = tenant, log, times

    def advance(self) -> bool:
        self._log.append(self.tenant)
        self._times -= 1
        return self._times > 0


def test_deliveries_take_turns_by_tenant() -> None:
    """A hundred streams of one client with much to send delay another's by one delivery for each of its own."""
    log: list[str] = []

    async def run() -> None:
        deliveries = Deliveries()
        for _ in range(100):
            deliveries.add(Reader("greedy", log, 3))
        deliveries.add(Reader("modest", log, 4))
        while len(log) < 304:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert log[:8].count("modest") == 4 and log.count("greedy") == 300
