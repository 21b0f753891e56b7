"""Who would be preempted without the drafts in flight."""

from __future__ import annotations

import copy

from stridelm.cache.ledger import Ledger
from stridelm.schedule import Planner, Queue
from stridelm.types import StepPlan


def check_preempted(plan: StepPlan, planner: Planner, queue: Queue, ledger: Ledger) -> None:
    """Whoever the plan, not applied yet, preempts would also be preempted if the steps in flight had no drafts."""
    if not plan.preempted:
        return
    queue, ledger = copy.deepcopy((queue, ledger))
    for request in queue.running:
        if request.tokens_in_flight and not request.all_or_nothing:
            request.rows_in_flight = request.known - 1 + request.tokens_in_flight - request.computed
            ledger.trim(request)
    bare = planner.plan(queue, ledger)
    assert {request.id for request in plan.preempted} <= {request.id for request in bare.preempted}
