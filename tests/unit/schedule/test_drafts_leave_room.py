"""No request is preempted because others draft.

Random loads run through the real queue, planner and ledger, without a model: how much of a draft is accepted is drawn.
With a lag of one, steps are planned while the one before is unread, as on a GPU.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from stridelm.cache.ledger import Ledger
from stridelm.cache.transaction import Transaction
from stridelm.params import SamplingParams, Speculation
from stridelm.schedule import Budget, Planner, Queue
from stridelm.types import Request, StepPlan
from support.checks.room import check_preempted

WINDOWS: dict[str, dict[str, int | None]] = {"full": {"full": None}, "two": {"full": None, "window_6": 6}}
"""Page groups -> how far back their layers attend."""
SEEDS = range(40)


@dataclass
class Load:
    """Requests that arrive over twenty steps, and an engine without a model that serves them on few pages."""

    seed: int
    groups: str = "full"
    lag: int = 1
    drafts: bool = True
    luck: float | None = None
    """Chance that a level of a draft is accepted; None: each request has one of its own."""
    tenants: tuple[str, ...] = ("",)
    trusted: float = 0.0
    """Share of the requests that are `all_or_nothing`."""
    caching: bool = True
    flights: deque[tuple[StepPlan, Transaction]] = field(default_factory=deque)
    ran: list[list[tuple[str, int, int]]] = field(default_factory=list)
    """The spans of each step: request, start, real rows."""
    preempted: int = 0
    drafted: int = 0

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        windows, page_size = WINDOWS[self.groups], rng.choice((1, 2, 4, 8))
        self.requests = [self._request(rng, number) for number in range(rng.randint(2, 12))]
        self.arrivals = sorted(rng.randrange(20) for _ in self.requests)
        most = max(r.known + (r.params.max_tokens or 0) + 2 * r.rows_by_depth[-1] + 2 for r in self.requests)
        pages, slots = -(-most // page_size), rng.randint(2, 8)
        pages += rng.randint(0, 2 * pages)
        self.ledger = Ledger(
            dict.fromkeys(windows, pages), page_size, windows=windows, prefix_caching=self.caching, strict=True
        )
        self.queue = Queue(slots)
        self.planner = Planner(Budget(rng.choice((40, 80, 200)), slots), lag=self.lag)
        for request in self.requests:
            if not (self.drafts or request.all_or_nothing):
                request.rows_by_depth = (0,)

    def _request(self, rng: random.Random, number: int) -> Request:
        width, depth = rng.choice((1, 1, 2)), rng.randint(1, 8)
        return Request(
            id=str(number),
            prompt_ids=[rng.randrange(50) for _ in range(rng.randint(1, 30))],
            params=SamplingParams(max_tokens=rng.randint(1, 60)),
            speculation=Speculation(),
            rows_by_depth=tuple(width * level for level in range(depth + 1)),
            arrival=number,
            tenant=rng.choice(self.tenants),
            seed=rng.randrange(2**32),
            host_bound=rng.random() < 0.2,
            all_or_nothing=rng.random() < self.trusted,
        )

    def run(self) -> Load:
        """Serve everybody."""
        while len(self.ran) <= self.arrivals[-1] or not self.queue.empty:
            assert len(self.ran) < 5000, "something starved"
            for request, step in zip(self.requests, self.arrivals, strict=True):
                if step == len(self.ran):
                    self.queue.add(request)
            self.step()
        assert all(len(request.output_ids) == request.params.max_tokens for request in self.requests)
        self.ledger.check(())
        return self

    def step(self) -> None:
        plan = self.planner.plan(self.queue, self.ledger)
        check_preempted(plan, self.planner, self.queue, self.ledger)
        for request in plan.preempted:
            self.ledger.release(request)
        self.queue.apply(plan)
        for request in plan.admitted:
            self.ledger.admit(request)
        if plan.spans:
            with self.ledger.reserve(plan.spans) as transaction:
                transaction.hold()
            self.flights.append((plan, transaction))
        self.ran.append([(span.request.id, span.start, span.real) for span in plan.spans])
        self.preempted += len(plan.preempted)
        self.drafted += sum(span.draft for span in plan.spans)
        while len(self.flights) > (self.lag if plan.spans else 0):
            self.land(*self.flights.popleft())
        self.ledger.check(self.queue.running)

    def land(self, plan: StepPlan, transaction: Transaction) -> None:
        here = [transaction._ledger.lease(s.request) is t for s, t in zip(plan.spans, transaction.leases, strict=True)]
        reals = [
            span.request.known - span.request.computed if span.decides and alive else span.real
            for span, alive in zip(plan.spans, here, strict=True)
        ]
        accepted = [self.accepted(span.request, span.depth) if span.decides else 0 for span in plan.spans]
        kept = [0 if s.request.all_or_nothing else levels for s, levels in zip(plan.spans, accepted, strict=True)]
        assert transaction.commit(kept, reals) == here
        for span, alive, levels in zip(plan.spans, here, accepted, strict=True):
            if alive and span.decides:
                self.emit(span.request, levels + 1)

    def emit(self, request: Request, tokens: int) -> None:
        assert request.params.max_tokens is not None
        request.output_ids += [0] * min(tokens, request.params.max_tokens - len(request.output_ids))
        if len(request.output_ids) == request.params.max_tokens:
            self.queue.remove(request.id)
            self.ledger.release(request)

    def accepted(self, request: Request, depth: int) -> int:
        """Levels, the same in every run of the load."""
        luck = random.Random(request.seed).random() if self.luck is None else self.luck
        draw = random.Random(f"{request.seed} {len(request.output_ids)}")
        return next((level for level in range(depth) if draw.random() >= luck), depth)


LOADS: dict[str, dict[str, Any]] = {
    "alike": {},
    "tenants": {"tenants": ("a", "b")},
    "trusted windows": {"trusted": 0.3},
    "two page groups": {"groups": "two"},
    "all": {"groups": "two", "tenants": ("a", "b"), "trusted": 0.3},
}


@pytest.mark.parametrize("luck", [0.0, 0.6, 1.0, None])
@pytest.mark.parametrize("load", LOADS)
def test_no_draft_preempts(load: str, luck: float | None) -> None:
    """Whoever is preempted would be without the drafts in flight, and loads preempt no more often than in plain
    decoding: in all, since who is faster than whom, and so who needs pages when, depends on what is accepted.
    Loads with trusted windows, which need many pages at once, are exempt from the sum."""
    drafting = [Load(seed, luck=luck, **LOADS[load]).run() for seed in SEEDS]
    plain = [Load(seed, luck=luck, drafts=False, **LOADS[load]).run() for seed in SEEDS]
    preempted, wanted = (sum(each.preempted for each in loads) for loads in (drafting, plain))
    assert 0 < preempted <= wanted or LOADS[load].get("trusted")
    assert sum(each.drafted for each in drafting) > 5_000


@pytest.mark.parametrize("load", LOADS)
def test_refused_drafts_leave_no_trace(load: str) -> None:
    """Where every verdict is read before the next plan, drafts that are all refused change no step."""
    for seed in SEEDS:
        drafting, plain = (
            Load(seed, lag=0, luck=0.0, caching=False, drafts=drafts, **LOADS[load]).run() for drafts in (True, False)
        )
        assert drafting.ran == plain.ran and drafting.preempted == plain.preempted
