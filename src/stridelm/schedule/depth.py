"""How deep to draft: decided once per request and step, by the planner, and nowhere else.

A policy sees the requests of a plan and nothing of the device, so that every rank that plans the same step chooses the
same depths.
"""

from __future__ import annotations

from typing import Protocol

from stridelm.schedule.rows import useful_depth
from stridelm.types import Request


class DepthPolicy(Protocol):
    """Called while a plan is made; must not change state that another call would see."""

    def depth(self, request: Request) -> int:
        """Maximum levels of the request's next draft, 0 for none. The planner uses fewer if rows or pages are short, or
        if the request could not emit as many tokens. Not called for `all_or_nothing` requests."""
        ...


class Configured:
    """The request's own depth, at every load."""

    def depth(self, request: Request) -> int:
        return len(request.rows_by_depth) - 1


def worth_drafting(policy: DepthPolicy, request: Request) -> int:
    """Levels that the policy allows and from which a token could still be emitted."""
    allowed = policy.depth(request)
    assert allowed >= 0, f"a depth policy allowed {allowed} levels"
    return min(allowed, useful_depth(request))
