"""Waiting and running requests and what each holds: the only place where requests enter and leave the engine's tables.

However a request ends, everything it held is freed: pages, slot, and the state of its drafter and log-probabilities.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from stridelm.cache.ledger import Ledger
from stridelm.draft.dispatch import Drafters
from stridelm.engine.introspect import Introspection
from stridelm.engine.shortage import is_shortage
from stridelm.engine.stats import EngineStats
from stridelm.faults import RequestFault
from stridelm.grammar.guide import Guide
from stridelm.grammar.share import MaskShare
from stridelm.run.state import TokenTable
from stridelm.sample.table import SamplingTable
from stridelm.schedule import Queue
from stridelm.schedule.rows import behind_after
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
    guide: Callable[[Request, MaskShare], Guide]
    """Makes the grammar guide of a request that has a grammar."""
    mask_share: MaskShare = field(default_factory=MaskShare)
    stats: EngineStats = field(default_factory=EngineStats)
    outputs: list[StepOutput] = field(default_factory=list)
    """Outputs of steps since they were last collected."""
    planned_rows: int = 0
    """Rows of the plan that was entered last."""

    def enter(self, plan: StepPlan) -> StepPlan:
        """Apply the plan to the queue, the ledger and the tables. Returns the plan without the requests that could not
        be admitted, which have failed. Raises RequestFault if there was no memory to admit one."""
        self.planned_rows = plan.rows
        for request in plan.preempted:
            self.ledger.release(request)
        self.queue.apply(plan)
        self.stats.preemptions += len(plan.preempted)
        for request in plan.admitted:
            try:
                self._admit(request)
            except Exception as error:
                if is_shortage(error):
                    raise RequestFault(request) from error
                self.outputs.append(self.fail(request, error))
        spans = tuple(span for span in plan.spans if span.request.status is Status.RUNNING)
        for span in spans:
            span.request.behind = behind_after(span)
        return plan if len(spans) == len(plan.spans) else replace(plan, spans=spans)

    def _admit(self, request: Request) -> None:
        self.ledger.admit(request)
        if request.stats.admitted_s is None:
            request.stats.admitted_s = time.perf_counter()
            self.stats.prompt += len(request.prompt_ids)
            self.stats.cached_prompt += request.computed
        self.tokens.admit(request.slot, request.token_ids, request.computed)
        guide = None if request.params.structured_outputs is None else self.guide(request, self.mask_share)
        # The ids that `min_tokens` suppresses: end-of-text and the request's own stop ids.
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
        """Drop a waiting or running request. False if there is none with this id."""
        request = self.queue.get(id)
        if request is None:
            return False
        self._take_out(request)
        request.finish_reason = "abort"
        self.stats.aborted += 1
        return True

    def fail(self, request: Request, error: BaseException) -> StepOutput:
        """End a waiting, running or just finished request because of an error of its own. Returns its last output."""
        logger.error("request %s failed and was ended; the others continue", request.id, exc_info=error)
        if not self._take_out(request):
            self._leave(request)
        request.error = f"{type(error).__name__} inside the engine"
        request.finish_reason, request.stop_reason = "error", None
        self.stats.failed += 1
        return StepOutput(request, [], finished=True)

    def cut(self, request: Request, length: int, stop_reason: str) -> None:
        """End a request after the first `length` tokens of its output, for a reason found in its text. Later tokens
        are dropped; they may already have ended it."""
        self.stats.emitted -= len(request.output_ids) - length
        del request.output_ids[length:]
        if self._take_out(request):
            self.stats.finished += 1
            request.stats.finished_s = time.perf_counter()
        request.finish_reason, request.stop_reason = "stop", stop_reason

    def start_over(self) -> None:
        """Preempt all running requests, so that the host's tokens are authoritative again."""
        running = tuple(self.queue.running)
        for request in running:
            self.ledger.release(request)
        self.queue.apply(StepPlan(preempted=running))

    def _take_out(self, request: Request) -> bool:
        """Free all that a request holds, if it is still queued. Returns whether it was."""
        if self.queue.get(request.id) is not request:
            return False
        self.queue.remove(request.id)
        self.ledger.release(request)
        self._leave(request)
        return True

    def _leave(self, request: Request) -> None:
        """Forget a request whose end is decided. Errors here are only logged."""
        self.inside.forget(request)
        try:
            self.drafters.leave(request)
        except Exception:
            logger.exception("the drafter failed when request %s left it", request.id)
