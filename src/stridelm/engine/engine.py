"""The engine: wires the parts together and offers the operations that callers use: add, abort, step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING

from stridelm.cache.layout import windows_of
from stridelm.cache.ledger import Ledger
from stridelm.config import DEFAULT_CAPTURE_MEMORY, EngineConfig
from stridelm.draft.dispatch import Drafters
from stridelm.draft.settle import can_choose, settle
from stridelm.engine.capture import Capture
from stridelm.engine.device_step import DeviceStep
from stridelm.engine.doubts import Doubts
from stridelm.engine.emit import Emitter
from stridelm.engine.intake import Intake
from stridelm.engine.introspect import Introspection
from stridelm.engine.kv_dtype import stored_states
from stridelm.engine.load import LoadedModel, load
from stridelm.engine.resplit import Resplit
from stridelm.engine.roster import Roster
from stridelm.engine.shortage import is_shortage
from stridelm.engine.step import Steps, Tracer
from stridelm.engine.warm_up import Wave, decodes_to_measure, prompts_to_measure, warm_up_requests
from stridelm.faults import EngineFault, RequestFault, TracerFault
from stridelm.grammar.cache import CACHE_BYTES, GrammarCache
from stridelm.grammar.compiler import Grammars
from stridelm.kernels import compilations, step_ops_for
from stridelm.params import SamplingParams, StructuredOutputs
from stridelm.progress import bar
from stridelm.run.eager import EagerRunner
from stridelm.run.graphs import GraphPool
from stridelm.run.heads import TargetRuntime
from stridelm.run.state import PageTables, TokenTable
from stridelm.run.trap import PageFault
from stridelm.sample.sampler import Sampler
from stridelm.sample.table import SamplingTable
from stridelm.schedule import Budget, Configured, Planner, Queue, Unbounded, smallest_budget, within
from stridelm.schedule.adaptive import Adaptive, load_loops
from stridelm.schedule.limits import HOST_PATIENCE, PATIENCE
from stridelm.schedule.row_stairs import RowStairs
from stridelm.schedule.step_cost import StepCost
from stridelm.types import OVERRUN, Request, Status, StepOutput
from stridelm.verify.verifier import Verifier

if TYPE_CHECKING:
    from stridelm.run.segments import Segments

logger = logging.getLogger(__name__)

PROBE = "the engine's own"
"""Id of the test request that shows whether the engine works."""


class Engine:
    """One model, its KV, and the requests that share them. Not thread-safe: only one caller may step it."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        self.config = config
        self.loaded = loaded = loaded or load(config)
        self.tokenizer = loaded.tokenizer
        self.ledger = Ledger(
            loaded.pages,
            config.page_size,
            windows=windows_of(loaded.pool.states),
            prefix_caching=config.enable_prefix_caching,
            strict=config.strict,
        )
        self.resplit = Resplit(self.ledger, loaded.pool, loaded.target.max_length, config.max_num_batched_tokens)
        ops = step_ops_for(loaded.device)
        self.tokens = TokenTable(config.max_num_seqs, loaded.target.max_length, loaded.device, ops)
        self.sampling = SamplingTable(config.max_num_seqs, loaded.target.vocab_size, loaded.device)
        width = self.ledger.pages_for(loaded.target.max_length + OVERRUN)
        self.pages = PageTables(tuple(loaded.pages), config.max_num_seqs, width, loaded.device)
        sampler = Sampler(self.sampling, self.tokens)
        guesser = Sampler(self.sampling, self.tokens, grammars=not loaded.attention.reads_device)
        chooses = config.depth == "auto" and can_choose(settle(config.speculation, loaded.target))
        apart = not loaded.attention.reads_device
        self.patience = HOST_PATIENCE if apart else PATIENCE
        """Most rows that a drafter's KV may lack, if depths are chosen."""
        self.runner = EagerRunner(loaded.model, loaded.pool, loaded.attention, config.check_pages)
        runtime = TargetRuntime(
            self.runner,
            self.pages,
            config.page_size,
            loaded.pool.dtype,
            partial(stored_states, config),
            loaded.deterministic,
            ops,
            self.tokens.arena,
            self.patience if chooses else 0,
        )
        self.drafters = Drafters(loaded.target, guesser, self.tokens, runtime)
        self.device = DeviceStep(
            self.runner, self.drafters, Verifier(sampler, self.tokens), self.tokens, self.pages, config.page_size
        )
        self.queue = Queue(config.max_num_seqs)
        self.compiled_grammars: GrammarCache[StructuredOutputs] = GrammarCache(CACHE_BYTES)
        self.intake = Intake(
            loaded.target,
            self.drafters,
            self.ledger,
            self.resplit.most_pages,
            config.max_num_batched_tokens,
            config.speculation,
            loaded.tokenizer is not None,
            lambda: self.grammars,
            chooses,
            not self.device.on_bounds,
            config.spec_decode_metrics,
        )
        self.intake.settled(SamplingParams())  # raises if no request could be drafted as configured
        self.roster = Roster(
            self.queue,
            self.ledger,
            self.tokens,
            self.sampling,
            self.drafters,
            Introspection(),
            loaded.eos_ids,
            lambda request, share: self.grammars.guide(request, share),
        )
        self.stats = self.roster.stats
        self.budget = Budget(config.max_num_batched_tokens, config.max_num_seqs)
        emitter = Emitter(self.roster, loaded.eos_id, loaded.target.max_length)
        load_loops()  # any request may ask for depths to be chosen, and none is to wait for it
        self.cost = StepCost()
        prompts = within(config.itl_target_ms, self.cost)
        self.adaptive = Adaptive(self.cost, time.perf_counter) if chooses else None
        lag = int(self.device.on_bounds)
        planner = Planner(self.budget, self.adaptive or Configured(self.cost), prompts, lag, runtime.patience, apart)
        self.steps = Steps(planner, self.roster, self.device, emitter, lag, self.resplit)
        self.doubts = Doubts()
        self._spared: Request | None = None
        """The request whose own work last ran out of memory: a second time it ends."""
        self._arrivals = 0
        self.capture: Capture | None = None
        if self.device.on_bounds and loaded.device.type == "cuda" and config.may_capture:
            self._capture_steps()
            if config.capture == "startup":
                self._get_ready()

    def _capture_steps(self) -> None:
        from stridelm.run.segments import Segments

        compilations.watch()
        budget = DEFAULT_CAPTURE_MEMORY if self.config.capture_memory is None else self.config.capture_memory
        pool = GraphPool(int(budget * 2**30), self.loaded.device)
        longest = self.tokens.tokens.shape[1]
        self.capture_into(pool, Segments(self.runner, pool, longest))

    def _get_ready(self) -> None:
        """Capture and compile what ordinary requests need."""
        assert self.capture is not None
        self.capture.at_start()
        self._warm_up()
        self._count_made()

    def _warm_up(self) -> None:
        """Serve some of the engine's own requests, and keep nothing of them but what steps cost."""
        self.loaded.attention.warm_up(self.config.page_size, self.loaded.device)
        self.resplit.warm_up()
        self.device.verifier.warm_up()
        target, planner = self.loaded.target, self.steps.planner
        grammars = self.tokenizer is not None and find_spec("llguidance") is not None
        with planner.using(planner.depths, Unbounded()):  # while kernels are compiled, times say nothing
            self.serve_own(list(warm_up_requests(target.vocab_size, target.max_length, self.budget, grammars=grammars)))
            planner.depths.clear()
            self._measure(prompts_to_measure(target.vocab_size, target.max_length, self.budget))
            if self.adaptive is not None:
                _, rows_by_depth = self.intake.settled(SamplingParams())
                self._measure(decodes_to_measure(len(rows_by_depth) - 1, self.budget))
                self.adaptive.keep_costs()
        self.stats.reset()

    def serve_own(self, waves: Sequence[Wave]) -> None:
        """Serve requests of the engine's own, a wave arriving at each step."""
        with bar("warming up", len(waves), "steps") as advance:
            for number, wave in enumerate(waves):
                self._add_own(f"{PROBE} {number}", wave)
                self.step()
                advance(1)
        self._finish_own()

    def _measure(self, waves: Iterable[Wave]) -> None:
        """Serve requests of the engine's own, one wave after another."""
        for number, wave in enumerate(waves):
            self._add_own(f"{PROBE} {number}", wave)
            self._finish_own()

    def _add_own(self, id: str, wave: Wave) -> None:
        for place, (prompt, params) in enumerate(wave):
            with suppress(ValueError):  # too long for the pool
                self.add(f"{id} {place}", prompt, params)

    def _finish_own(self) -> None:
        while self.busy:
            self.step()
        self.forget()

    def capture_into(self, pool: GraphPool, segments: Segments | None) -> None:
        """From now on, capture steps into this pool and replay them."""

        def typical(params: SamplingParams) -> Request:
            return self.intake.request("", [0], params)

        shallow = self.intake.adaptive
        self.capture = Capture(self.device, self.sampling, pool, segments, typical, self.budget, self.stats, shallow)
        self.steps.device = self.capture
        if self.adaptive is not None and shallow:
            self.adaptive.rates.stairs = RowStairs(self.capture.row_stairs)

    def time_steps(self, timed: bool) -> None:
        """Start or stop recording in `stats.part_ms` how long the device takes for each part of a step. For benchmarks:
        a timed step lands at once, and steps already captured are captured anew."""
        self.device.timed = timed
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

        tenant: owner of the request; if several have requests, they take turns. bad_words: tokens of the words that the
        parameters forbid. seed: shared by a prompt's samples, if the parameters have none. The engine does not handle
        text: stop strings belong to text_engine.py.
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
        if request.adaptive and self.adaptive is None:
            self.adaptive = self.steps.planner.depths = Adaptive(self.cost, time.perf_counter)
        self.steps.planner.rows.need(smallest_budget(request))
        self._arrivals += 1
        return request

    def abort(self, id: str) -> bool:
        """Drop a waiting or running request and free all it holds at once. False if there is none with this id."""
        return self.roster.abort(id)

    def cut(self, request: Request, length: int, stop_reason: str) -> None:
        """End a request after the first `length` tokens of its output, for a reason found in its text. Later tokens
        are dropped; they may already have ended it."""
        self.roster.cut(request, length, stop_reason)

    def fail(self, request: Request, error: BaseException) -> StepOutput:
        """End a waiting, running or just finished request because of an error of its own. Returns its last output."""
        return self.roster.fail(request, error)

    def step(self) -> list[StepOutput]:
        """Run one step and return its outputs.

        A request that makes the step fail ends alone, with the finish reason "error"; the others start over from the
        tokens emitted so far, and may have to wait some steps until it is found (engine/doubts.py). If a step runs out
        of memory, all start over and steps have fewer rows for a while. Raises EngineFault if no single request is to
        blame, with the engine as it was before the step, and whatever `tracer` raises.
        """
        if self.doubts.look():
            self._start_over()
        self.queue.only = self.doubts.on_trial
        try:
            self.steps.step()
        except RequestFault as fault:
            if fault.request is self._spared or not self._make_do(fault.__cause__):
                self._start_over()
                self.roster.outputs.append(self.fail(fault.request, fault.__cause__ or fault))
            else:
                self._spared = fault.request
        except TracerFault as fault:
            self._start_over()
            raise fault.__cause__ or fault from None
        except Exception as error:
            if not self._make_do(error):
                self._search(error)
        except BaseException:
            self._start_over()
            raise
        else:
            self._went_well()
        if self.ledger.strict:
            self.ledger.check(self.queue.running)
        self._count_made()
        outputs, self.roster.outputs = self.roster.outputs, []
        return outputs

    @property
    def slack(self) -> float:
        """Seconds for which a caller may wait for more requests before the next step, at no cost to those that run; 0
        if that is less than a millisecond, or if no other request could run. Ask again after at most a millisecond: the
        step that runs may end earlier than expected."""
        if self.queue.plannable or len(self.queue.running) >= self.budget.requests:
            return 0.0
        return self.steps.slack()

    def _count_made(self) -> None:
        """Graphs and kernels made so far, and depths chosen, in the statistics."""
        if self.capture is not None:
            self.stats.captures, self.stats.compilations = self.capture.pool.graphs, compilations.count()
            self.stats.missing_graphs = self.capture.missing
        if self.adaptive is not None:
            if not self.busy:
                self.adaptive.settle()
            self.stats.depths = self.adaptive.figures

    @property
    def busy(self) -> bool:
        return not self.queue.empty or bool(self.steps.flights)

    def check(self) -> None:
        """Raise RuntimeError naming the leak if the ledger does not balance."""
        self.ledger.check(self.queue.running)

    def forget(self) -> None:
        """Drop all traces of earlier requests: the prefix cache, and what drafters and the policy that chooses depths
        learned from them. Under the exact rule this does not change outputs, but it may change their speed, so
        benchmarks call it before each run. What steps cost is kept."""
        self.ledger.flush()
        self.drafters.forget()
        if self.adaptive is not None:
            self.adaptive.forget()

    def _make_do(self, error: BaseException | None) -> bool:
        """After a step that ran out of memory: try again with fewer rows. False if that was not why it failed, or if
        steps cannot have fewer."""
        rows, planned = self.steps.planner.rows, self.roster.planned_rows
        first = rows.is_full
        if not (is_shortage(error) and rows.fall(planned)):
            return False
        self.stats.memory_shortages += 1
        if first:
            logger.warning(
                "a step of %d rows ran out of memory; its requests start over, and steps have at most %d rows instead "
                "of %d until some have gone well. If this recurs, lower kv_memory_fraction or max_num_batched_tokens",
                *(planned, rows.now, rows.most),
                exc_info=error,
            )
        self._start_over()
        return True

    def _went_well(self) -> None:
        rows = self.steps.planner.rows
        short = not rows.is_full
        rows.went_well()
        if short and rows.is_full:
            self._spared = None
            logger.info("steps have up to %d rows again", rows.now)

    def _search(self, error: Exception) -> None:
        """After a step that failed for an unknown reason: try again, or search for the request that makes it fail."""
        self.stats.failed_steps += 1
        involved = self.queue.running or list(chain.from_iterable(self.queue.plannable.values()))
        self._start_over()
        if isinstance(error, PageFault):  # raised by `check_pages`, to expose bugs of the engine
            raise error
        try:
            culprit = self.doubts.failed(involved)
        except EngineFault as fault:
            raise fault from error
        if culprit is None:
            logger.error("a step of %d requests failed; they start over", len(involved), exc_info=error)
        elif not self._works():
            raise EngineFault("the engine fails for every request") from error
        else:
            self.roster.outputs.append(self.fail(culprit, error))

    def _works(self) -> bool:
        """Whether a test request of the engine's own runs while all others are held back."""
        params = SamplingParams(temperature=0.0, max_tokens=1, speculation="off")
        probe = self.intake.request(PROBE, [0], params)
        self.queue.add(probe)
        self.queue.only = frozenset((probe,))
        try:
            while probe.status is not Status.FINISHED:
                self.steps.step()
        except Exception:
            self._start_over()
            self.abort(PROBE)
        finally:
            self.queue.only = None
        self.roster.outputs = [output for output in self.roster.outputs if output.request is not probe]
        return probe.finish_reason in ("stop", "length")

    def _start_over(self) -> None:
        """After an interrupted step, the device may have tokens that the host never saw. Preempting all requests makes
        the host's tokens authoritative again."""
        self.steps.flights.clear()
        self.roster.start_over()

    @property
    def tracer(self) -> Tracer | None:
        """Called at every step; `step` raises what it raises."""
        return self.steps.tracer

    @tracer.setter
    def tracer(self, tracer: Tracer | None) -> None:
        self.steps.tracer = tracer

    @cached_property
    def grammars(self) -> Grammars:
        """Made for the first request that needs it: reading the tokenizer's vocabulary takes a while."""
        assert self.tokenizer is not None
        target = self.loaded.target
        return Grammars(self.tokenizer, target.vocab_size, self.loaded.eos_ids, self.compiled_grammars)
