"""Whose drafters leave their own KV to a later step, where depths are chosen.

Following the target at every step is what plain decoding does not have to do, so a step that drafts nothing may leave
it to a later one. Once `patience` tokens are missing, or before a step that drafts, a step without drafts brings all of
it up to date.

A host need not treat all requests alike: there each one's is brought up to date when it is due, or before it drafts,
whatever the others do. It leaves prompts to a later step, too, so that many short ones are never read: the requests end
before. But not where prompts begin alike, since pages without drafters' KV are not found by requests that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stridelm.schedule.rows import most_decoded
from stridelm.schedule.step_budget import Allocation


@dataclass
class Waits:
    patience: int = 0
    """Most tokens that a drafter's KV may lack; 0: none waits."""
    apart: bool = False
    """Whether that of some requests may wait in a step that writes others'."""

    def of(self, served: Sequence[Allocation], drafts: Callable[[], bool]) -> list[bool]:
        """Of each request of a step. drafts: whether as many requests as there are draft, so that no prompt may be left
        to a later one."""
        if not self.patience:
            return [False] * len(served)
        if self.apart:
            unread = not all(map(_only_decodes, served)) and not drafts()
            return [self._may_wait(each, unread) for each in served]
        keeping = [each for each in served if each.request.draft_kv and each.request.draft_kv.may_wait]
        return [bool(keeping) and all(map(_only_decodes, served)) and all(map(self._may_wait, keeping))] * len(served)

    def _may_wait(self, served: Allocation, unread: bool = False) -> bool:
        request = served.request
        if served.allowed or request.draft_kv is None or not request.draft_kv.may_wait:
            return False
        within = request.behind + served.real <= self.patience
        return within and (_only_decodes(served) or (unread and request.adaptive and not request.rereads))


def _only_decodes(allocation: Allocation) -> bool:
    """Whether the request reads no prompt, and is not to draft."""
    return allocation.allowed == 0 and allocation.real <= most_decoded(allocation.request)
