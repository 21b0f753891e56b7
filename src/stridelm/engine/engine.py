"""The engine: the rooms wired together, and the doors that callers use: add, abort, step."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from stridelm.cache.layout import windows_of
from stridelm.cache.ledger import Ledger
from stridelm.cache.transaction import Transaction
from stridelm.config import DEFAULT_CAPTURE_MEMORY, EngineConfig
from stridelm.draft.dispatch import Drafters
from stridelm.engine.capture import Capture
from stridelm.engine.doubts import Doubts
from stridelm.engine.emit import Emitter
from stridelm.engine.intake import Intake
from stridelm.engine.load import LoadedModel, load
from stridelm.engine.outcome import Outcome
from stridelm.engine.stats import EngineStats
from stridelm.engine.step import Flight, Run, on_device, step
from stridelm.faults import EngineFault, RequestFault, TracerFault
from stridelm.params import SamplingParams
from stridelm.run.batch import build
from stridelm.run.eager import EagerRunner
from stridelm.run.graphs import GraphPool
from stridelm.run.heads import TargetRuntime
from stridelm.run.padded import build_on_bounds, frame, shape_of
from stridelm.run.state import PageTables, TokenTable
from stridelm.run.trap import PageFault
from stridelm.sample.grammar import Grammars
from stridelm.sample.sampler import Sampler
from stridelm.sample.table import SamplingTable
from stridelm.schedule import Budget, Planner, Queue
from stridelm.types import OVERRUN, Draft, ForwardBatch, Request, Span, Status, StepOutput, StepPlan
from stridelm.upload import upload
from stridelm.verify.verifier import Verifier

if TYPE_CHECKING:
    from stridelm.run.segments import Segments

logger = logging.getLogger(__name__)

PROBE = "the engine's own"
"""Id of the request that shows whether the engine works."""

Tracer = Callable[[StepPlan, Draft, ForwardBatch, Outcome], None]


class Engine:
    """One model, its KV, and the requests that share them. Not thread-safe: one caller steps it."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        self.config = config
        self.loaded = loaded = loaded or load(config)
        self.tokenizer = loaded.tokenizer
        self.groups = tuple(loaded.pages)
        self.ledger = Ledger(
            loaded.pages,
            config.page_size,
            windows=windows_of(loaded.pool.states),
            prefix_caching=config.enable_prefix_caching,
            strict=config.strict,
        )
        self.tokens = TokenTable(config.max_num_seqs, loaded.target.max_length, loaded.device)
        self.sampling = SamplingTable(config.max_num_seqs, loaded.target.vocab_size, loaded.device)
        width = self.ledger.pages_for(loaded.target.max_length + OVERRUN)
        self.pages = PageTables(self.groups, config.max_num_seqs, width, loaded.device)
        self.on_bounds = loaded.attention.reads_device
        """The device finds lengths and pages by itself, and steps are planned on bounds."""
        sampler = Sampler(self.sampling, self.tokens)
        self.runner = EagerRunner(loaded.model, loaded.pool, loaded.attention, config.check_pages)
        runtime = TargetRuntime(
            self.runner, self.pages, loaded.pages, config.page_size, loaded.pool.dtype, loaded.deterministic
        )
        self.drafters = Drafters(loaded.target, sampler, self.tokens, runtime)
        self.verifier = Verifier(sampler, self.tokens)
        self.queue = Queue(config.max_num_seqs)
        self.planner = Planner(Budget(config.max_num_batched_tokens, config.max_num_seqs))
        self.stats = EngineStats()
        self.intake = Intake(
            loaded.target,
            self.drafters,
            self.ledger,
            config.max_num_batched_tokens,
            config.speculation,
            loaded.tokenizer is not None,
            lambda: self.grammars,
        )
        self.intake.check_default()
        self.emitter = Emitter(self)
        self.outputs: list[StepOutput] = []
        """What steps gave since the last look."""
        self.doubts = Doubts()
        self.tracer: Tracer | None = None
        self.flights: deque[Flight] = deque()
        self.lag = int(self.on_bounds)
        """Launched steps that the host leaves unread while it plans the next."""
        self.timed = False
        self._arrivals = 0
        self.segments: Segments | None = None
        self.graphs: GraphPool | None = None
        self.capture: Capture | None = None
        if self.on_bounds and loaded.device.type == "cuda" and config.may_capture:
            self._capture_steps()

    def _capture_steps(self) -> None:
        from stridelm.run.segments import Segments

        budget = DEFAULT_CAPTURE_MEMORY if self.config.capture_memory is None else self.config.capture_memory
        self.graphs = graphs = GraphPool(int(budget * 2**30), self.loaded.device)
        longest = self.tokens.tokens.shape[1]
        self.segments = Segments(self.runner, graphs, longest, deterministic=self.loaded.deterministic)
        self.capture = Capture(self, graphs)
        if self.config.capture == "startup":
            self.capture.at_start()

    def time_steps(self, timed: bool) -> None:
        """Say from now on in `stats.part_ms` how long the device takes for the parts of a step, or no longer. For
        benchmarks: a timed step lands at once, and what was captured is captured anew."""
        self.timed = timed
        if self.capture is not None:
            self._capture_steps()

    def add(
        self,
        id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        sample_index: int = 0,
        tenant: str = "",
        bad_words: Sequence[Sequence[int]] = (),
        seed: int | None = None,
    ) -> Request:
        """Queue a request. Raises ValueError, with nothing changed, if it can never be served.

        tenant: whose it is; where several have requests, they take turns. bad_words: tokens of the words that the
        parameters forbid. seed: the one that a prompt's samples share, where the parameters name none. Text is not the
        engine's business: stop strings are text_engine.py's.
        """
        request = self.intake.request(
            id,
            prompt_ids,
            params,
            sample_index=sample_index,
            arrival=self._arrivals,
            tenant=tenant,
            bad_words=bad_words,
            seed=seed,
        )
        self.queue.add(request)
        self._arrivals += 1
        return request

    def abort(self, id: str) -> bool:
        """Drop a request, waiting or running; whatever it holds comes back at once. False if there is none."""
        request = self.queue.remove(id)
        if request is None:
            return False
        self.ledger.release(request)
        self._leave(request)
        request.finish_reason = "abort"
        self.stats.aborted += 1
        return True

    def step(self) -> list[StepOutput]:
        """Run one step and return what it gave each request.

        A request that makes the step fail ends alone, with the finish reason "error"; the others start over from the
        tokens that were emitted so far, and may have to wait some steps until it is found (engine/doubts.py). Raises
        EngineFault if the failure is nobody's, with the engine as it was before the step, and whatever `tracer` raises.
        """
        if self.doubts.look():
            self._start_over()
        self.queue.only = self.doubts.on_trial
        try:
            step(self)
        except RequestFault as fault:
            self._start_over()
            self.fail(fault.request, fault.__cause__ or fault)
        except TracerFault as fault:
            self._start_over()
            raise fault.__cause__ or fault from None
        except Exception as error:
            self._search(error)
        except BaseException:
            self._start_over()
            raise
        if self.ledger.strict:
            self.ledger.check(self.queue.running)
        outputs, self.outputs = self.outputs, []
        return outputs

    @property
    def busy(self) -> bool:
        return not self.queue.empty or bool(self.flights)

    def check(self) -> None:
        """Raise RuntimeError naming the leak if the ledger does not balance."""
        self.ledger.check(self.queue.running)

    def forget(self) -> None:
        """Drop what earlier requests left: the prefix cache, and what drafters learned from them. Under the exact rule
        outputs are the same with or without; how soon they come may not be, so benchmarks start from here."""
        self.ledger.flush()
        self.drafters.forget()

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request, waiting, running or just finished, because of an error that is its own."""
        logger.error("request %s failed and is ended; the others go on", request.id, exc_info=error)
        request.error = f"{type(error).__name__} inside the engine"
        request.finish_reason, request.stop_reason = "error", None
        if self.queue.remove(request.id) is request:
            self.ledger.release(request)
        self._leave(request)
        self.stats.failed += 1
        self.outputs.append(StepOutput(request, [], finished=True))

    def _leave(self, request: Request) -> None:
        """Forget a request whose end is decided. What goes wrong here harms nobody."""
        self.emitter.forget(request)
        try:
            self.drafters.leave(request)
        except Exception:
            logger.exception("what request %s left with its drafter could not be taken in", request.id)

    def _search(self, error: Exception) -> None:
        """After a step that failed, nobody knows why: try again, or find who makes it fail."""
        self.stats.failed_steps += 1
        involved = self.queue.running or list(chain.from_iterable(self.queue.plannable.values()))
        self._start_over()
        if isinstance(error, PageFault):  # set as a trap for the engine's own faults
            raise error
        try:
            culprit = self.doubts.failed(involved)
        except EngineFault as fault:
            raise fault from error
        if culprit is None:
            logger.error("a step of %d requests failed; they start over", len(involved), exc_info=error)
        elif not self._works():
            raise EngineFault("the engine fails whatever it is given") from error
        else:
            self.fail(culprit, error)

    def _works(self) -> bool:
        """Whether a request of the engine's own runs, with all others held back."""
        params = SamplingParams(temperature=0.0, max_tokens=1, speculation="off")
        probe = self.intake.request(PROBE, [0], params)
        self.queue.add(probe)
        self.queue.only = frozenset((probe,))
        try:
            while probe.status is not Status.FINISHED:
                step(self)
        except Exception:
            self._start_over()
            self.abort(PROBE)
        finally:
            self.queue.only = None
        self.outputs = [output for output in self.outputs if output.request is not probe]
        return probe.finish_reason in ("stop", "length")

    def _start_over(self) -> None:
        """After a step that broke off, the device may know tokens that the host never saw. Preempting everybody makes
        the host's tokens the truth again."""
        self.flights.clear()
        running = tuple(self.queue.running)
        for request in running:
            self.ledger.release(request)
        self.queue.apply(StepPlan(preempted=running))

    # What the step asks of the wiring.

    def lag_behind(self, flight: Flight | None) -> int:
        """Launched steps to leave unread behind this one. Log-probabilities, hidden states and traces are read off the
        step's own tensors, so it lands at once; with nothing launched, what is in flight lands."""
        if flight is None or self.tracer is not None or self.timed:
            return 0
        return 0 if any(span.request.params.reads_rows for span in flight.plan.spans) else self.lag

    def enter(self, plan: StepPlan) -> StepPlan:
        """Apply the plan to the queue, the ledger and the request table. Returns the plan without the requests that
        could not be admitted, which have failed."""
        for request in plan.preempted:
            self.ledger.release(request)
        self.queue.apply(plan)
        self.stats.preemptions += len(plan.preempted)
        for request in plan.admitted:
            try:
                self._admit(request)
            except Exception as error:
                self.fail(request, error)
        spans = tuple(span for span in plan.spans if span.request.status is Status.RUNNING)
        return plan if len(spans) == len(plan.spans) else replace(plan, spans=spans)

    def _admit(self, request: Request) -> None:
        self.ledger.admit(request)
        self.tokens.admit(request.slot, request.token_ids, request.computed)
        guide = None if request.params.structured_outputs is None else self.grammars.guide(request)
        self.sampling.set(request.slot, request, self.stop_ids(request), request.bad_words, guide)
        self.drafters.admit(request)

    def run(self, plan: StepPlan, transaction: Transaction) -> Run:
        """The device's part of the step: a replay if it was captured whole, else part by part."""
        self.pages.update(plan.spans, transaction)
        draft: Draft | None = None
        if self.drafters.on_host(plan.spans):
            draft = self.drafters.propose(plan.spans, self.slots(plan))
        if self.capture is not None:
            replayed = self.capture.run(plan, draft)
            if replayed is not None:
                return replayed
        slots = self.slots(plan)

        def propose() -> Draft:
            if draft is not None:
                return draft
            return self.drafters.propose(plan.spans, slots, None if self.capture is None else self.capture.propose)

        forward = (self.segments or self.runner).forward
        build = partial(self._build, plan.spans, slots=slots, transaction=transaction)
        return on_device(self, plan.spans, slots, propose, build, forward)

    def _build(
        self, spans: tuple[Span, ...], draft: Draft, slots: torch.Tensor, transaction: Transaction
    ) -> ForwardBatch:
        """The step's batch: on bounds where the device finds lengths and pages by itself."""
        page_size = self.ledger.page_size
        if not self.on_bounds:
            return build(spans, draft, self.tokens, slots, transaction, self.groups, page_size)
        layout = frame(shape_of(spans), draft.width, slots.device)
        most = max(span.end for span in spans)
        return build_on_bounds(spans, layout, draft, self.tokens, self.pages, slots, page_size, most)

    def slots(self, plan: StepPlan) -> torch.Tensor:
        """[R] each span's row of the request table."""
        return upload([span.request.slot for span in plan.spans], self.loaded.device)

    @cached_property
    def grammars(self) -> Grammars:
        """Made when the first request asks: reading the tokenizer's vocabulary takes a while."""
        assert self.tokenizer is not None
        return Grammars(self.tokenizer, self.loaded.target.vocab_size, self.loaded.eos_ids)

    def stop_ids(self, request: Request) -> list[int]:
        """Ids that `min_tokens` holds back: end-of-text and the request's own stop ids."""
        return sorted({*self.loaded.eos_ids, *request.stop_ids})

    def finish(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """End a running request and take back what it holds."""
        assert request.status is Status.RUNNING
        request.finish_reason, request.stop_reason = reason, stop_reason
        self.ledger.release(request)
        self.queue.finish(request)
        self._leave(request)
        self.stats.finished += 1

    def cut(self, request: Request, length: int, stop_reason: str) -> None:
        """End a request after the first `length` tokens of its output, for a reason that only its text shows. Tokens
        after those are dropped; it may have ended by them already."""
        self.stats.emitted -= len(request.output_ids) - length
        del request.output_ids[length:]
        if self.queue.remove(request.id) is request:
            self.ledger.release(request)
            self._leave(request)
            self.stats.finished += 1
            request.stats.finished_s = time.perf_counter()
        request.finish_reason, request.stop_reason = "stop", stop_reason

    def trace(self, plan: StepPlan, run: Run, outcome: Outcome) -> None:
        """Raises TracerFault."""
        if self.tracer is None:
            return
        assert run.detail is not None
        try:
            self.tracer(plan, run.detail.draft, run.detail.batch, outcome)
        except Exception as error:
            raise TracerFault from error
