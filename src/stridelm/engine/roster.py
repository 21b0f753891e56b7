"""Who waits, who runs and what each holds: the one place where requests enter the engine's tables and leave them.

Whatever ends a request, all that it held is back when it is over: pages, slot, what its drafter and its
log-probabilities kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from stridelm.cache.ledger import Ledger
from stridelm.draft.dispatch import Drafters
from stridelm.engine.introspect import Introspection
from stridelm.engine.stats import EngineStats
from stridelm.run.state import TokenTable
from stridelm.sample.grammar import Guide
from stridelm.sample.table import SamplingTable
from stridelm.schedule import Queue
from stridelm.types import Request, Status, StepOutput, StepPlan

logger = logging.getLogger(__name__)


@dataclass
class Roster:
    queue: Queue
    ledger: Ledger
    tokens: TokenTable
    sampling: SamplingTable
    drafters: Drafters
    inside: Introspection
    eos_ids: tuple[int, ...]
    guide: Callable[[Request], Guide]
    """Follows the grammar of a request that has one."""
    stats: EngineStats = field(default_factory=EngineStats)
    outputs: list[StepOutput] = field(default_factory=list)
    """What steps gave since the last look."""

    def enter(self, plan: StepPlan) -> StepPlan:
        """Apply the plan to the queue, the ledger and the tables. Returns the plan without the requests that could not
        be admitted, which have failed."""
        for request in plan.preempted:
            self.ledger.release(request)
        self.queue.apply(plan)
        self.stats.preemptions += len(plan.preempted)
        for request in plan.admitted:
            try:
                self._admit(request)
            except Exception as error:
                self.outputs.append(self.fail(request, error))
        spans = tuple(span for span in plan.spans if span.request.status is Status.RUNNING)
        return plan if len(spans) == len(plan.spans) else replace(plan, spans=spans)

    def _admit(self, request: Request) -> None:
        self.ledger.admit(request)
        self.tokens.admit(request.slot, request.token_ids, request.computed)
        guide = None if request.params.structured_outputs is None else self.guide(request)
        # What `min_tokens` holds back: end-of-text and the request's own stop ids.
        stop_ids = sorted({*self.eos_ids, *request.stop_ids})
        self.sampling.set(request.slot, request, stop_ids, request.bad_words, guide)
        self.drafters.admit(request)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """End a running request."""
        assert request.status is Status.RUNNING
        self._take_out(request)
        request.finish_reason, request.stop_reason = reason, stop_reason
        self.stats.finished += 1

    def abort(self, id: str) -> bool:
        """Drop a request, waiting or running. False if there is none."""
        request = self.queue.get(id)
        if request is None:
            return False
        self._take_out(request)
        request.finish_reason = "abort"
        self.stats.aborted += 1
        return True

    def fail(self, request: Request, error: BaseException) -> StepOutput:
        """End a request, waiting, running or just finished, because of an error that is its own. Returns what it is
        told."""
        logger.error("request %s failed and is ended; the others go on", request.id, exc_info=error)
        if not self._take_out(request):
            self._leave(request)
        request.error = f"{type(error).__name__} inside the engine"
        request.finish_reason, request.stop_reason = "error", None
        self.stats.failed += 1
        return StepOutput(request, [], finished=True)

    def cut(self, request: Request, length: int, stop_reason: str) -> None:
        """End a request after the first `length` tokens of its output, for a reason that only its text shows. Tokens
        after those are dropped; it may have ended by them already."""
        self.stats.emitted -= len(request.output_ids) - length
        del request.output_ids[length:]
        if self._take_out(request):
            self.stats.finished += 1
            request.stats.finished_s = time.perf_counter()
        request.finish_reason, request.stop_reason = "stop", stop_reason

    def start_over(self) -> None:
        """Preempt everybody: what the host knows of them is the truth again."""
        running = tuple(self.queue.running)
        for request in running:
            self.ledger.release(request)
        self.queue.apply(StepPlan(preempted=running))

    def _take_out(self, request: Request) -> bool:
        """Take back all that a request holds, if it is still here. Returns whether it was."""
        if self.queue.get(request.id) is not request:
            return False
        self.queue.remove(request.id)
        self.ledger.release(request)
        self._leave(request)
        return True

    def _leave(self, request: Request) -> None:
        """Forget a request whose end is decided. What goes wrong here harms nobody."""
        self.inside.forget(request)
        try:
            self.drafters.leave(request)
        except Exception:
            logger.exception("what request %s left with its drafter could not be taken in", request.id)
