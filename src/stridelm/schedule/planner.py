"""Picks the spans of the next step from queue state alone. It changes nothing; the engine applies the plan.

There are no phases. Every running request first gets the smallest span worth running, in order of service
(fairness.py), so that a long prompt never stalls the decodes after it; to make room, requests later in the order may be
preempted. The remaining rows go to known tokens, of running requests and of newcomers, and last to drafts, each again
in order of service, so that drafting never delays known tokens. If some requests decode, prompts get only as many rows
as leave the step short enough for them (prompt_rows.py). A small prompt is read beside long ones, not after them: a
tenth of the step's prompt rows goes first to newcomers that fit into it. A newcomer that finds no room replaces a
running request after it in the order, and only a tenant that has at least two more requests running gives one up. A
draft grows from the last known token, so it needs all of its request's real rows in the span. The window of an
`all_or_nothing` request is allocated together with them.

A step that drafts nothing may leave the KV of drafters to a later one (waits.py).

No request is preempted because others draft. What a draft does not need is given back when its verdict is read; if the
next step is planned before that, drafts leave the pages that its smallest spans will need.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice

from stridelm.schedule.depth import Configured, DepthPolicy, Others
from stridelm.schedule.depth_figures import is_free, reasons
from stridelm.schedule.fairness import Newcomers, ServiceOrder, in_turn
from stridelm.schedule.limits import Budget, PageView
from stridelm.schedule.prompt_rows import PromptPolicy, Unbounded
from stridelm.schedule.queue import Queue
from stridelm.schedule.row_budget import RowBudget
from stridelm.schedule.rows import blocked, has_draft_in_flight, is_unseen, least_span, useful_depth
from stridelm.schedule.step_budget import Allocation, StepBudget
from stridelm.schedule.step_shape import StepShape, shape_of
from stridelm.schedule.waits import Waits
from stridelm.types import Follow, PageCounts, Request, StepPlan

SMALL = 10
"""Newcomers that take up to this part of a step's prompt rows together do not wait for prompts that are being read."""


class Planner:
    def __init__(
        self,
        budget: Budget,
        depths: DepthPolicy | None = None,
        prompts: PromptPolicy | None = None,
        lag: int = 0,
        patience: int = 0,
        apart: bool = False,
    ) -> None:
        """lag: number of steps whose verdicts are unread while the next is planned, 0 or 1. patience, apart: as of
        Waits."""
        self.budget = budget
        self.waits = Waits(patience, apart)
        self.rows = RowBudget(budget.tokens)
        self.lag = lag
        self.depths: DepthPolicy = Configured() if depths is None else depths
        self.prompts: PromptPolicy = Unbounded() if prompts is None else prompts

    def plan(self, queue: Queue, pages: PageView) -> StepPlan:
        """The next step. Spans are in order of service: those of running requests, then those of admitted ones.

        A plan may preempt and have no span: pages shared by several victims count only once the victims are gone.
        """
        budget = StepBudget(self.rows.now, pages)
        waiting = queue.plannable
        running, newcomers = in_turn(queue.running, waiting)
        turns = {request: turn for turn, request in running if not blocked(request)}
        allocations, preempted, short = _serve(list(turns), budget)
        slots = self.budget.requests - len(queue.running) if waiting else 0
        coming = min(slots, sum(map(len, waiting.values())))
        reading = sum([not allocation.decides for allocation in allocations])
        # If no prompt is being read, those that wait may have to wait longer: for pages.
        joining = reading + coming if reading else 0
        others = Others(reads=bool(slots or reading), joining=joining)
        self._ask(allocations, others)
        if others.reads:
            budget.reading = min(budget.reading, self._prompt_rows(allocations, waiting, slots))
        admitted: list[Allocation] = []
        drafting = True
        # Running requests that lack pages come before any newcomer.
        if preempted or short or not waiting:
            for allocation in allocations:
                _read_on(allocation, budget)
        else:
            admitted, refused = _read_all(allocations, turns, newcomers, slots, budget)
            victim = next(reversed(turns), None)
            if refused and victim and not admitted and _gives_way(turns[victim], refused):
                if slots and any(map(has_draft_in_flight, queue.running)):
                    drafting = False  # their pages may be all that the newcomer lacks: see in the next step
                else:
                    preempted.append(victim)
                    allocations = [allocation for allocation in allocations if allocation.request is not victim]
        served = [*allocations, *admitted]
        follows = [Follow.NOW] * len(served)
        if drafting:
            if self.lag:
                _look_ahead(served, set(queue.running).difference(preempted), budget)
            self._ask(served, others)
            follows = self.waits.of(served, lambda: self.depths.drafts(len(queue.running) + coming))
            if self.waits.apart or not any(allocation.request.behind for allocation in served):
                for allocation in served:
                    if allocation.allowed and not allocation.request.behind:
                        _deepen(allocation, budget)
        spans = tuple(allocation.span(follow) for allocation, follow in zip(served, follows, strict=True))
        entering = tuple(allocation.request for allocation in admitted)
        return StepPlan(spans, entering, tuple(preempted), lacking=budget.lacked)

    @contextmanager
    def using(self, depths: DepthPolicy, prompts: PromptPolicy) -> Iterator[None]:
        """Plan by other policies inside. All steps must have landed, before and at the end."""
        own = self.depths, self.prompts
        self.depths, self.prompts = depths, prompts
        try:
            yield
        finally:
            self.depths, self.prompts = own

    def explained(self, plan: StepPlan) -> StepPlan:
        """The plan with its reasons. To be asked before anything lands after `plan`."""
        free = [span.request for span in plan.spans if is_free(span)]
        choice = self.depths.explain(free, shape_of(plan.spans).prompt)
        return replace(plan, reasons=reasons(plan.spans, choice))

    def _ask(self, allocations: list[Allocation], others: Others) -> None:
        """Ask the depth policy for those requests that decide and that it was not asked for yet."""
        free = [each for each in allocations if each.decides and not each.request.all_or_nothing]
        for each in free:
            if each.allowed is None and is_unseen(each.request, each.real):
                each.allowed = 0
        new = [each for each in free if each.allowed is None]
        if new:
            others = replace(others, asked=len(free) - len(new))
            depths = self.depths.depths([each.request for each in new], others)
            assert min(depths) >= 0, f"a depth policy allowed {min(depths)} levels"
            for allocation, depth in zip(new, depths, strict=True):
                allocation.allowed = depth

    def _prompt_rows(self, allocations: list[Allocation], lines: Mapping[str, Sequence[Request]], slots: int) -> float:
        """Rows that prompts may have beside those of these requests that decode. lines: of the requests that wait, for
        as many slots."""
        decoding = [each for each in allocations if each.decides]
        if not decoding:
            return math.inf
        depths = [each.depth if each.request.all_or_nothing else _useful(each) for each in decoding]
        rows = sum(each.real + each.request.rows_by_depth[depth] for each, depth in zip(decoding, depths, strict=True))
        context = sum([each.start for each in allocations])
        waiting = sum(each.uncomputed - each.real for each in allocations)
        waiting += sum(request.known for request in islice(chain.from_iterable(lines.values()), slots))
        return self.prompts.rows(StepShape(len(decoding), rows, max(depths), context), waiting)


def _read_all(
    allocations: list[Allocation],
    turns: dict[Request, ServiceOrder],
    newcomers: Newcomers,
    slots: int,
    budget: StepBudget,
) -> tuple[list[Allocation], ServiceOrder | None]:
    """Allocate rows to known tokens, of running requests and of newcomers, in order of service. Returns the admitted
    requests, and the turn of the first newcomer that is left without a slot or pages. The newcomers after it wait too,
    so none is overtaken.

    All known tokens of a newcomer must fit beside what the requests before it still need; otherwise it would be
    preempted at once, and prefill again and again. One that has the pool to itself is exempt.

    Small prompts at the head of the newcomers go before the rest of earlier prompts of the same priority. These keep
    all but a part of the rows, so they are not starved.
    """
    admitted: list[Allocation] = []
    refused: ServiceOrder | None = None
    pending = deque(allocations)
    promised = budget.pages.all(0)
    beside = min(budget.rows, budget.reading) // SMALL
    for allocation in allocations if slots else ():
        promised += budget.promised(allocation)
    for turn, request in newcomers:
        if len(admitted) == slots:
            refused = turn
            break
        small = request.known <= beside and not (pending and turns[pending[0].request][0] < turn[0])
        while pending and not small and turns[pending[0].request] < turn:
            earlier = pending.popleft()
            promised -= budget.promised(earlier)
            _read_on(earlier, budget)
            promised += budget.promised(earlier)
        if budget.rows == 0 or budget.reading < 1:
            break
        allocation = budget.open_waiting(request)
        real, depth = least_span(request, allocation.uncomputed)
        lacking = promised + budget.promised(allocation) - budget.pages
        crowded = bool(allocations or admitted) and any(short > 0 for short in lacking)
        if not crowded:  # even what one that has the pool to itself lacks for its first rows
            budget.note(budget.lacking(allocation, real + allocation.request.rows_by_depth[depth]))
        budget.note(lacking)
        if crowded or not budget.take(allocation, real, depth):
            refused = turn if crowded or allocation.request.rows_by_depth[depth] + real <= budget.rows else None
            break
        _read_on(allocation, budget)
        promised += budget.promised(allocation)
        admitted.append(allocation)
        beside -= request.known
    for allocation in pending:
        _read_on(allocation, budget)
    return admitted, refused


def _gives_way(last: ServiceOrder, refused: ServiceOrder) -> bool:
    """Whether the request served last gives way to the newcomer: its priority is not higher, and its tenant has at
    least two more requests running than the newcomer's."""
    return refused[0] <= last[0] and refused[1] < last[1]


def _serve(running: list[Request], budget: StepBudget) -> tuple[list[Allocation], list[Request], bool]:
    """The smallest span for each running request, the requests preempted to fit them, and whether any request still
    lacks pages. Victims come from the back, so they have no allocation yet."""
    allocations: list[Allocation] = []
    preempted: list[Request] = []
    short = False
    pending = deque(running)
    while pending and budget.rows > 0:
        allocation = budget.open(pending.popleft())
        real, depth = least_span(allocation.request, allocation.uncomputed)
        rows = real + allocation.request.rows_by_depth[depth]
        if rows > budget.rows:
            continue
        if not budget.take(allocation, real, depth):
            lacking = budget.lacking(allocation, rows)
            budget.note(lacking)
            victims = _victims(pending, lacking, budget.view)
            if not victims and not allocations:
                # The best-ranked request must proceed. Pages shared among the requests after it are held by none of
                # them alone, so they were not counted; once all are preempted, the next plan sees every page.
                victims = list(reversed(pending))
            for victim in victims:
                pending.remove(victim)
                budget.pages += budget.view.reclaimable(victim)
            preempted += victims
            if not budget.take(allocation, real, depth):
                short = True
                continue
        allocations.append(allocation)
    return allocations, preempted, short


def _victims(pending: deque[Request], lacking: PageCounts, view: PageView) -> list[Request]:
    """The worst-ranked requests whose pages cover `lacking`; none if even all of them together would not."""
    victims: list[Request] = []
    for request in reversed(pending):
        gain = view.reclaimable(request)
        if not any(gained for gained, short in zip(gain, lacking, strict=True) if short > 0):
            continue
        victims.append(request)
        lacking -= gain
        if all(short <= 0 for short in lacking):
            return victims
    return []


def _useful(allocation: Allocation) -> int:
    """Levels that a request which decides may draft, and of which a token could still be emitted."""
    assert allocation.allowed is not None
    return min(allocation.allowed, useful_depth(allocation.request)) if allocation.allowed else 0


def _read_on(allocation: Allocation, budget: StepBudget) -> None:
    """Allocate the request's remaining real rows, as far as rows and pages allow."""
    if allocation.decides:
        return
    if allocation.request.all_or_nothing:
        _read_on_to_window(allocation, budget)
    else:
        budget.take(allocation, budget.most_real(allocation, allocation.uncomputed), 0)


def _read_on_to_window(allocation: Allocation, budget: StepBudget) -> None:
    """All real rows and the full window, or a chunk that leaves a row for the window to grow from."""
    whole = allocation.uncomputed - allocation.real
    fits = budget.readable(allocation, allocation.uncomputed) == whole
    if not (fits and budget.take(allocation, allocation.uncomputed, len(allocation.request.rows_by_depth) - 1)):
        budget.take(allocation, budget.most_real(allocation, allocation.uncomputed - 1), 0)


def _look_ahead(served: list[Allocation], running: set[Request], budget: StepBudget) -> None:
    """Set aside pages for the smallest span of each of these requests in the next step."""
    staying = running.union(allocation.request for allocation in served)
    if budget.pages.cover(budget.pages.all(sum(2 * request.rows_by_depth[-1] + 1 for request in staying))):
        return  # enough even if every row of a draft, and of the span after it, takes a page
    idle = staying.difference(allocation.request for allocation in served)
    for allocation in (*served, *map(budget.open, idle)):
        budget.look_ahead(allocation)


def _deepen(allocation: Allocation, budget: StepBudget) -> None:
    """Allocate the deepest usable draft to a request that may have one."""
    for depth in range(_useful(allocation), 0, -1):
        if budget.draft(allocation, depth):
            return
