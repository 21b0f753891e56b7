"""Workers try out clients' grammars first, because one that never finishes compiling must hang neither the engine nor
the HTTP process. A grammar that has passed is remembered here, and the engine compiles it on a thread. What is
remembered is counted as the engine's cache counts it, so that a grammar that fell out there is tried again before it is
compiled again. Tenants take turns with the workers, and share what is remembered.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict, dataclass

import msgspec

from stridelm.grammar.cache import CACHE_BYTES, GrammarCache
from stridelm.params import StructuredOutputs
from stridelm.server.errors import bad_request
from stridelm.server.workers.grammars import Opening
from stridelm.server.workers.pool import Died, Pool, TimedLane, TookTooLong

QUICK_S, COMPILE_S = 0.5, 5.0
"""How long a trial may take before it moves to the slow lane, and at most. Most take a few hundredths of a second."""
WAITING, SLOW_WAITING = 16, 4
"""Trials of one tenant that may wait for one of the two quick workers, and for the slow one: where there is no other,
a usual grammar waits at most four seconds."""


@dataclass(eq=False)
class _Trial:
    """A grammar that is being tried out."""

    task: asyncio.Task[None]
    waiting: int = 0
    """Requests that wait for it."""


class GrammarSandbox:
    """model: directory of the tokenizer; vocab_size: of the model."""

    def __init__(self, model: str, vocab_size: int) -> None:
        self._pool = Pool(
            "grammars",
            msgspec.json.encode(Opening(model, vocab_size)),
            "grammars",
            TimedLane(places=2, waiting=WAITING, seconds=QUICK_S),
            TimedLane(places=1, waiting=SLOW_WAITING, seconds=COMPILE_S),
        )
        self._passed: GrammarCache[StructuredOutputs] = GrammarCache(CACHE_BYTES)
        self._trials: dict[tuple[str, StructuredOutputs], _Trial] = {}

    async def get_ready(self) -> None:
        """So that the first grammar need not wait for the workers to be loaded. Without it, that happens then."""
        with suppress(OSError):
            await self._pool.start()

    async def check(self, grammar: StructuredOutputs, tenant: str) -> None:
        """Raises ApiError if it cannot be compiled, or not in time. A tenant's requests with the same grammar share a
        trial, which ends at once if all of them are cancelled."""
        if self._passed.get(grammar):
            return
        trial = self._trials.get((tenant, grammar))
        if trial is None:
            trial = _Trial(asyncio.create_task(self._try_out(grammar, tenant)))
            self._trials[tenant, grammar] = trial
            trial.task.add_done_callback(_look)
        trial.waiting += 1
        try:
            await asyncio.shield(trial.task)
        finally:
            trial.waiting -= 1
            if not trial.waiting:
                trial.task.cancel()
                self._trials.pop((tenant, grammar))

    async def _try_out(self, grammar: StructuredOutputs, tenant: str) -> None:
        text = msgspec.json.encode(asdict(grammar))
        try:
            tried = msgspec.json.decode(await self._pool.do(tenant, text), type=str | int)
        except TookTooLong:
            tried = (
                f"structured_outputs: the {grammar.kind} took longer than {COMPILE_S:g} s to compile; make it simpler"
            )
        except Died:
            tried = "structured_outputs: the compiler crashed or ran out of memory; make it simpler"
        if isinstance(tried, str):
            raise bad_request(tried, "structured_outputs")
        self._passed.put(grammar, True, tried, tenant)

    async def close(self) -> None:
        await self._pool.close()


def _look(task: asyncio.Task[None]) -> None:
    """Without this, asyncio would log the error of a trial whose requests have all left."""
    if not task.cancelled():
        task.exception()
