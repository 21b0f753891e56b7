"""Picks the spans of the next step from queue state alone. It looks and changes nothing; the engine applies
the plan.

There are no phases. Every running request is first given the smallest span worth running, in order of service
(fairness.py), so that a long prompt never stops the decodes behind it; for this, requests behind may be preempted.
What is left goes to known tokens, of the running and of newcomers, and last to drafts, each again in order of
service: what somebody guesses keeps nobody from being served. A newcomer that finds no room takes the place of a
request behind it: only a tenant that has at least two more requests running gives one up. A draft needs all of its
request's real rows: it grows from the last known token. Only a window that is semantics comes with them.
"""

from __future__ import annotations

from collections import deque

from stridelm.schedule.fairness import Newcomers, Turn, in_turn
from stridelm.schedule.limits import Budget, PageView
from stridelm.schedule.purse import Grant, Purse
from stridelm.schedule.queue import Queue
from stridelm.schedule.rows import least_span, resting, useful_depth
from stridelm.types import Request, StepPlan


class Planner:
    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def plan(self, queue: Queue, pages: PageView) -> StepPlan:
        """The next step. Spans come in order of service: those of the running, then those of the admitted.

        A plan may preempt and have no span: pages shared by several victims count only once those are gone.
        """
        purse = Purse(self.budget.tokens, pages)
        running, newcomers = in_turn(queue.running, queue.plannable)
        turns = {request: turn for turn, request in running if not resting(request)}
        grants, preempted, short = _serve(list(turns), purse)
        admitted: list[Grant] = []
        # Whoever lacks pages comes before any newcomer.
        if preempted or short:
            for grant in grants:
                _read_on(grant, purse)
        else:
            slots = self.budget.requests - len(queue.running)
            admitted, refused = _read_all(grants, turns, newcomers, slots, purse)
            victim = next(reversed(turns), None)
            if refused and victim and not admitted and _gives_way(turns[victim], refused):
                preempted.append(victim)
                grants = [grant for grant in grants if grant.request is not victim]
        served = [*grants, *admitted]
        for grant in served:
            _deepen(grant, purse)
        spans = tuple(grant.span() for grant in served)
        return StepPlan(spans, tuple(grant.request for grant in admitted), tuple(preempted))


def _read_all(
    grants: list[Grant], turns: dict[Request, Turn], newcomers: Newcomers, slots: int, purse: Purse
) -> tuple[list[Grant], Turn | None]:
    """Give known tokens their rows, of the running and of newcomers, in order of service. Returns whom it admits, and
    the turn of the first newcomer that is left without a slot or without pages. It stops the others, so none is
    overtaken.

    A newcomer must fit with all it knows beside what those before it still need; otherwise it would be preempted at
    once, and prefill again and again. One that has the pool to itself need not: nobody is harmed.
    """
    admitted: list[Grant] = []
    refused: Turn | None = None
    behind = deque(grants)
    kept = sum(purse.promised(grant) for grant in grants) if slots else 0
    for turn, request in newcomers:
        if len(admitted) == slots:
            refused = turn
            break
        while behind and turns[behind[0].request] < turn:
            kept -= _read_on(behind.popleft(), purse)
        if purse.rows == 0:
            break
        grant = purse.open_waiting(request)
        real, depth = least_span(request, grant.owed)
        crowded = bool(grants or admitted) and purse.promised(grant) > purse.pages - kept
        if crowded or not purse.take(grant, real, depth):
            refused = turn if crowded or grant.request.ladder[depth] + real <= purse.rows else None
            break
        _read_on(grant, purse)
        kept += purse.promised(grant)
        admitted.append(grant)
    for grant in behind:
        _read_on(grant, purse)
    return admitted, refused


def _gives_way(last: Turn, refused: Turn) -> bool:
    """Whether who is served last runs beside two more of its tenant than the newcomer would."""
    return refused[0] <= last[0] and refused[1] < last[1]


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


def _read_on(grant: Grant, purse: Purse) -> int:
    """Give a request its other real rows, as far as there are rows and pages. Returns the pages that this takes."""
    pages = grant.pages
    if grant.request.whole:
        _read_on_to_window(grant, purse)
    else:
        purse.take(grant, purse.most_real(grant, grant.owed), 0)
    return grant.pages - pages


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
