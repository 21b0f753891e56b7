"""Submissions that wait until a thread of the engine's process has compiled their grammars.

Grammars are compiled one at a time, and tenants take turns. A compiled grammar is held until its request has ended, so
that a step never has to compile it again. So that held ones do not take all memory, a tenant's next grammar waits while
its open requests hold too much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from stridelm.grammar.cache import GrammarCache
from stridelm.grammar.compiler import Grammars
from stridelm.params import StructuredOutputs
from stridelm.server.fair_line import FairLine
from stridelm.server.messages import Submit

HELD_BYTES = 64 << 20
"""Compiled grammars that open requests of one tenant may hold when another is compiled for it."""


@dataclass(eq=False)
class Compiling:
    """A submission, and how many of its grammars are not compiled yet."""

    message: Submit
    specs: Sequence[StructuredOutputs]
    missing: int = 0
    error: BaseException | None = None
    """Why one of them cannot be used."""


class CompileLine:
    """grammars: made when first needed, which takes a while. is_open: whether the engine has the sample."""

    def __init__(
        self,
        grammars: Callable[[], Grammars],
        cache: GrammarCache[StructuredOutputs],
        is_open: Callable[[str], bool],
    ) -> None:
        self._grammars, self._cache, self._is_open = grammars, cache, is_open
        self._line: FairLine[tuple[Compiling, StructuredOutputs]] = FairLine()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._current: tuple[Compiling, Future[None]] | None = None
        self._waiting: list[Compiling] = []
        self._holding: list[Compiling] = []
        """Those that were handed out, until their samples have ended."""

    @property
    def waiting(self) -> list[Submit]:
        return [one.message for one in self._waiting]

    def add(self, message: Submit, specs: Sequence[StructuredOutputs]) -> None:
        """Let it wait; `ready` returns it, at once if all of its grammars are there."""
        one = Compiling(message, specs)
        self._waiting.append(one)
        for spec in specs:
            if not self._cache.hold(spec, message.tenant):
                one.missing += 1
                self._line.join(message.tenant, (one, spec))
        self._begin()

    def ready(self) -> list[tuple[Submit, BaseException | None]]:
        """The submissions with all grammars compiled, each with the error if one of them cannot be used."""
        if self._current is not None and self._current[1].done():
            one, done = self._current
            self._current = None
            self._line.finish(one.message.tenant)
            one.missing -= 1
            self._look(one, done)
        self._begin()
        ready = [one for one in self._waiting if not one.missing or one.error]
        for one in ready:
            self._waiting.remove(one)
            self._holding.append(one)
        return [(one.message, one.error) for one in ready]

    def drop(self, message: Submit) -> None:
        """It was aborted."""
        [one] = [one for one in self._waiting if one.message is message]
        self._waiting.remove(one)
        self._leave(one)
        self._holding.append(one)  # one of its grammars may still be compiled now; freed with the next

    def free_ended(self) -> None:
        """Let go of the grammars of requests that have ended."""
        for one in list(self._holding):
            samples = (id for job in one.message.jobs for id in job.ids)
            if not any(map(self._is_open, samples)) and (self._current is None or self._current[0] is not one):
                self._holding.remove(one)
                for spec in one.specs:
                    self._cache.free(spec, one.message.tenant)

    def _leave(self, one: Compiling) -> None:
        """Leave the line, with the grammars that have not been begun."""
        for spec in one.specs:
            self._line.leave(one.message.tenant, (one, spec))

    def _look(self, one: Compiling, done: Future[None]) -> None:
        one.error = one.error or done.exception()
        if len(one.specs) > 1 and sum(map(self._cache.size, one.specs)) > HELD_BYTES:
            one.error = ValueError(
                f"structured_outputs: the grammars of this request take more than {HELD_BYTES >> 20} MiB when "
                "compiled; send fewer of them at once, or make them simpler"
            )
        if one.error is not None:
            self._leave(one)

    def _begin(self) -> None:
        """Compile the next, if the thread is free."""
        if self._current is not None or not self._line:
            return
        self.free_ended()
        served = self._line.next(lambda tenant: self._cache.held_bytes(tenant) <= HELD_BYTES)
        if served is not None:
            tenant, (one, spec) = served
            self._current = one, self._thread.submit(self._compile, spec, tenant)

    def _compile(self, spec: StructuredOutputs, tenant: str) -> None:
        self._grammars().compile(spec, tenant)
