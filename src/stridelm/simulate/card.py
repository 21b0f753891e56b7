"""One simulated card: the engine's own planner, queue and ledger, around steps that take what a cost says.

It does what engine/step.py does, without a device: a step is planned and reserved when it is launched, and commits and
emits when it lands. With a lag of one the next step is planned while the one before it runs, on bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stridelm.cache.ledger import Ledger
from stridelm.cache.transaction import Transaction
from stridelm.engine.stats import count_acceptance
from stridelm.params import SamplingParams, Speculation
from stridelm.schedule import Budget, DepthPolicy, Planner, Queue, within
from stridelm.schedule.rows import behind_after, has_prompt
from stridelm.schedule.slack import EARLY, EARLY_SHARE
from stridelm.simulate.workload import Job
from stridelm.types import DraftKV, Request, Span, StepPlan

Seconds = Callable[[Sequence[Span]], float]
"""How long a step of these spans takes."""
Clock = Callable[[float], float]
"""What the policy is told of a step that takes so long."""


@dataclass(frozen=True)
class Limits:
    """Of the engine on a card; names as in EngineConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int = 1024
    num_pages: int = 2**20
    page_size: int = 16
    itl_target_ms: float = 40.0
    lag: int = 0
    patience: int = 0
    apart: bool = False
    """Both as of schedule/waits.py, where depths are chosen."""


@dataclass(frozen=True)
class Drafting:
    """How a card's requests are drafted."""

    drafter: str
    rows_by_depth: tuple[int, ...] = (0,)
    """Up to the depth of its requests."""
    adaptive: bool = False
    host_bound: bool = False
    may_wait: bool = False
    """Its own KV may be computed some steps later."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched."""

    plan: StepPlan
    transaction: Transaction
    begins: float
    ends: float


@dataclass(frozen=True, slots=True)
class Emission:
    """What a step emitted for a request."""

    request: Request
    tokens: int
    finished: bool


class Card:
    """Times are seconds of simulated time, which the caller advances."""

    def __init__(
        self, limits: Limits, drafting: Drafting, depths: DepthPolicy, seconds: Seconds, clock: Clock = float
    ) -> None:
        self.limits, self.drafting = limits, drafting
        self.queue = Queue(limits.max_num_seqs)
        self.ledger = Ledger({"full": limits.num_pages}, limits.page_size, prefix_caching=False)
        assert depths.cost is not None
        prompts = within(limits.itl_target_ms, depths.cost)
        budget = Budget(limits.max_num_batched_tokens, limits.max_num_seqs)
        patience = limits.patience if drafting.adaptive else 0
        self.planner = Planner(budget, depths, prompts, limits.lag, patience, limits.apart)
        self._draft_kv = DraftKV(drafting.drafter, lookahead=0, may_wait=True) if drafting.may_wait else None
        self._speculation = Speculation(drafter=drafting.drafter)
        self._seconds, self._clock = seconds, clock
        self._jobs: dict[Request, Job] = {}
        self._arrivals = 0
        self.flights: deque[Flight] = deque()
        self.steps = self.rows = self.preemptions = 0
        """Steps that have landed, their rows, and requests that had to give their pages back meanwhile."""

    @property
    def outstanding(self) -> int:
        """Requests that have not finished."""
        return len(self.queue)

    def add(self, name: str, job: Job) -> Request:
        """Queue a request. Raises ValueError if it would never fit into the pages."""
        need = self.ledger.pages_for(job.prompt_tokens + job.max_tokens)
        if need > self.limits.num_pages:
            raise ValueError(
                f"a request of {job.prompt_tokens} + {job.max_tokens} tokens may need {need} pages of KV and a card "
                f"has {self.limits.num_pages}; lower max_tokens or prompt_tokens, or raise num_pages"
            )
        request = Request(
            id=name,
            prompt_ids=[0] * job.prompt_tokens,
            params=SamplingParams(max_tokens=job.max_tokens),
            speculation=self._speculation,
            rows_by_depth=self.drafting.rows_by_depth,
            arrival=self._arrivals,
            host_bound=self.drafting.host_bound,
            adaptive=self.drafting.adaptive,
            draft_kv=self._draft_kv,
            needs_states=True,  # whatever drafts: of what others guess where a prompt ends, nothing is known
        )
        self._arrivals += 1
        if not (self.outstanding or self.flights):
            self._jobs.clear()  # those of requests that ended are needed until their last step has landed
        self._jobs[request] = job
        self.queue.add(request)
        return request

    def due(self, now: float) -> float:
        """When the next step is planned if more requests may arrive: now, or as late as Engine.slack allows."""
        full = bool(self.queue.plannable) or len(self.queue.running) == self.limits.max_num_seqs
        if full or not self.flights or len(self.flights) != self.limits.lag:
            return now
        flight = self.flights[-1]
        return max(now, flight.ends - EARLY_SHARE * (flight.ends - flight.begins) - EARLY)

    def launch(self, now: float) -> list[Flight]:
        """Launch as many steps as the lag allows and as there is work for."""
        launched = []
        while len(self.flights) <= self.limits.lag:
            flight = self._launch(now)
            if flight is None:
                break
            self.flights.append(flight)
            launched.append(flight)
        return launched

    def _launch(self, now: float) -> Flight | None:
        plan = self.planner.plan(self.queue, self.ledger)
        for request in plan.preempted:
            self.ledger.release(request)
        self.queue.apply(plan)
        self.preemptions += len(plan.preempted)
        for request in plan.admitted:
            self.ledger.admit(request)
        if not plan.spans:
            if plan.preempted:  # what they held is counted only now
                return self._launch(now)
            assert self.queue.empty or self.flights, "requests are queued and none can run"
            return None
        for span in plan.spans:
            span.request.behind = behind_after(span)
        with self.ledger.reserve(plan.spans) as transaction:
            transaction.hold()
        begins = max(now, self.flights[-1].ends) if self.flights else now
        return Flight(plan, transaction, begins, begins + self._seconds(plan.spans))

    def land(self) -> list[Emission]:
        """End the oldest step in flight: commit, and emit its tokens."""
        flight = self.flights.popleft()
        spans, seconds = flight.plan.spans, flight.ends - flight.begins
        prompts = [has_prompt(span) for span in spans]
        accepted = [
            0 if prompt else self._jobs[span.request].accepted(len(span.request.output_ids), span.depth)
            for span, prompt in zip(spans, prompts, strict=True)
        ]
        self.planner.depths.landed(spans, accepted, self._clock(seconds))
        alive = flight.transaction.commit(accepted)
        self.steps, self.rows = self.steps + 1, self.rows + flight.plan.rows
        emitted = []
        for span, levels, prompt, here in zip(spans, accepted, prompts, alive, strict=True):
            if here and span.decides:
                drafted = 0 if prompt else span.depth
                count_acceptance(span.request, levels, min(levels + 1, drafted), drafted)
                emitted.append(self._emit(span.request, levels + 1))
        return emitted

    def _emit(self, request: Request, tokens: int) -> Emission:
        job = self._jobs[request]
        taken = min(tokens, job.max_tokens - len(request.output_ids))
        request.output_ids += [0] * taken
        request.stats.steps += 1
        finished = len(request.output_ids) == job.max_tokens
        if finished:
            self.queue.remove(request.id)
            self.ledger.release(request)
        return Emission(request, taken, finished)

    def check(self) -> None:
        """Raise RuntimeError if the ledger does not balance."""
        self.ledger.check(self.queue.running)
