"""Picks the spans of the next step from queue state alone. It looks and changes nothing; the engine applies
the plan.

There are no phases. Every running request is first given the smallest span worth running, in order of rank,
so that a long prompt never stops the decodes behind it; only for this may lower-ranked requests be preempted.
What is left goes to the known tokens of the running, then to waiting requests, and last to drafts, each again
in order of rank: what somebody guesses keeps nobody from being served. A draft needs all of its request's real
rows: it grows from the last known token. Only a window that is semantics comes with them.
"""

from __future__ import annotations

from collections import deque

from stridelm.schedule.limits import Budget, PageView
from stridelm.schedule.purse import Grant, Purse
from stridelm.schedule.queue import Queue
from stridelm.schedule.rows import least_span, resting, useful_depth
from stridelm.types import Request, StepPlan


class Planner:
    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def plan(self, queue: Queue, pages: PageView) -> StepPlan:
        """The next step. Spans come in order of service: the running by rank, then the admitted by rank.

        A plan may preempt and have no span: pages shared by several victims count only once those are gone.
        """
        purse = Purse(self.budget.tokens, pages)
        running = [request for request in queue.running if not resting(request)]
        grants, preempted, short = _serve(running, purse)
        for grant in grants:
            _read_on(grant, purse)
        # Whoever lacks pages comes before any newcomer.
        slots = self.budget.requests - len(queue.running)
        admitted = [] if preempted or short else self._admit(queue, grants, slots, purse)
        served = [*grants, *admitted]
        for grant in served:
            _deepen(grant, purse)
        spans = tuple(grant.span() for grant in served)
        return StepPlan(spans, tuple(grant.request for grant in admitted), tuple(preempted))

    def _admit(self, queue: Queue, grants: list[Grant], slots: int, purse: Purse) -> list[Grant]:
        """Waiting requests in order of rank. The first that does not fit stops it, so none is overtaken.

        A newcomer must fit with all it knows beside what those before it still need; otherwise it would be
        preempted at once, and prefill again and again. One that has the pool to itself need not: nobody is
        harmed.
        """
        admitted: list[Grant] = []
        if slots == 0 or purse.rows == 0 or not queue.waiting:
            return admitted
        kept = sum(purse.promised(grant) for grant in grants)
        for request in queue.plannable:
            grant = purse.open_waiting(request)
            real, depth = least_span(request, grant.owed)
            crowded = bool(grants or admitted) and purse.promised(grant) > purse.pages - kept
            if crowded or not purse.take(grant, real, depth):
                break
            _read_on(grant, purse)
            kept += purse.promised(grant)
            admitted.append(grant)
            if len(admitted) == slots or purse.rows == 0:
                break
        return admitted


def _serve(running: list[Request], purse: Purse) -> tuple[list[Grant], list[Request], bool]:
    """The smallest span for each running request, who is preempted for it, and whether anybody lacks pages even so.
    Victims come from the back, so they have no grant yet."""
    grants: list[Grant] = []
    preempted: list[Request] = []
    short = False
    behind = deque(running)
    while behind and purse.rows > 0:
        grant = purse.open(behind.popleft())
        real, depth = least_span(grant.request, grant.owed)
        rows = real + grant.request.ladder[depth]
        if rows > purse.rows:
            continue
        if not purse.take(grant, real, depth):
            victims = _victims(behind, purse.lacking(grant, rows), purse.view)
            if not victims and not grants:
                # The best-ranked must go on. Pages that only those behind it share are nobody's alone, so
                # they were not counted; with all of them gone, the next plan sees every page.
                victims = list(reversed(behind))
            for victim in victims:
                behind.remove(victim)
                purse.pages += purse.view.reclaimable(victim)
            preempted += victims
            if not purse.take(grant, real, depth):
                short = True
                continue
        grants.append(grant)
    return grants, preempted, short


def _victims(behind: deque[Request], lacking: int, view: PageView) -> list[Request]:
    """The worst-ranked requests whose pages make up for `lacking`; none if all of them would not."""
    victims: list[Request] = []
    for request in reversed(behind):
        gain = view.reclaimable(request)
        if gain == 0:
            continue
        victims.append(request)
        lacking -= gain
        if lacking <= 0:
            return victims
    return []


def _read_on(grant: Grant, purse: Purse) -> None:
    """Give a request its other real rows, as far as there are rows and pages."""
    if grant.request.whole:
        _read_on_to_window(grant, purse)
    else:
        purse.take(grant, purse.most_real(grant, grant.owed), 0)


def _read_on_to_window(grant: Grant, purse: Purse) -> None:
    """All real rows and the full window, or a chunk that leaves a row for the window to grow from."""
    if not grant.decides and not purse.take(grant, grant.owed, len(grant.request.ladder) - 1):
        purse.take(grant, purse.most_real(grant, grant.owed - 1), 0)


def _deepen(grant: Grant, purse: Purse) -> None:
    """Give a request that has all its real rows the deepest draft that it can use."""
    request = grant.request
    if request.whole or not grant.decides:
        return
    for depth in range(useful_depth(request), 0, -1):
        if purse.take(grant, grant.real, depth):
            return
