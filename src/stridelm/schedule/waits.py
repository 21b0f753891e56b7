"""Whose drafters leave their own KV to a later step, where depths are chosen.

Following the target at every step is what plain decoding does not have to do, so a step that drafts nothing may leave
it to a later one. Once `patience` tokens are missing, or before a step that drafts, a step without drafts brings all of
it up to date.

A host need not treat all requests alike: there each one's is brought up to date when it is due, or before it drafts,
whatever the others do. It leaves prompts to a later step, too, so that many short ones are never read: the requests end
before. But not where prompts begin alike, since pages without drafters' KV are not found by requests that have one.

On a device a step that reads a prompt lets no drafter wait. But where nothing is drafted, only its entries are made,
since what a draft would grow from is its output at the newest row, and another row comes before any draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stridelm.schedule.rows import most_decoded
from stridelm.schedule.step_budget import Allocation
from stridelm.types import Follow


@dataclass
class Waits:
    patience: int = 0
    """Most tokens that a drafter's KV may lack; 0: none waits."""
    apart: bool = False
    """Whether that of some requests may wait in a step that writes others'."""

    def of(self, served: Sequence[Allocation], drafts: Callable[[], bool]) -> list[Follow]:
        """How far each request's drafter follows in a step. drafts: whether as many requests as there are draft; not
        asked if all of these do."""
        everybody = [Follow.NOW] * len(served)
        if not self.patience or all(each.allowed for each in served):
            return everybody
        reads = not all(map(_only_decodes, served))
        unread = reads and not drafts()
        if self.apart:
            return [Follow.LATER if self._may_wait(each, unread) else Follow.NOW for each in served]
        if unread and all(map(_follows_depths, served)):  # it reads a prompt, so that it is no captured step
            return [Follow.ENTRIES if _keeps(each) else Follow.NOW for each in served]
        keeping = [] if reads else [each for each in served if _keeps(each)]
        return [Follow.LATER] * len(served) if keeping and all(map(self._may_wait, keeping)) else everybody

    def _may_wait(self, served: Allocation, unread: bool = False) -> bool:
        request = served.request
        if served.allowed or not _keeps(served):
            return False
        within = request.behind + served.real <= self.patience
        return within and (_only_decodes(served) or (unread and request.adaptive and not request.rereads))


def _keeps(served: Allocation) -> bool:
    """Whether it has a drafter whose KV may be computed later."""
    return served.request.draft_kv is not None and served.request.draft_kv.may_wait


def _follows_depths(served: Allocation) -> bool:
    """Whether it drafts nothing now, nor as long as no depth stands."""
    return not served.allowed and (served.request.adaptive or len(served.request.rows_by_depth) == 1)


def _only_decodes(allocation: Allocation) -> bool:
    """Whether the request reads no prompt, and is not to draft."""
    return allocation.allowed == 0 and allocation.real <= most_decoded(allocation.request)
