"""How deep to draft: asked once per request and step, by the planner, and nowhere decided again.

A policy sees the requests of a plan and nothing of the device, so that every rank that plans the same step comes to the
same depths.
"""

from __future__ import annotations

from typing import Protocol

from stridelm.schedule.rows import useful_depth
from stridelm.types import Request


class DepthPolicy(Protocol):
    """Called while a plan is made: it may not change anything that another call would see."""

    def depth(self, request: Request) -> int:
        """Most levels that the request's next draft may have, 0 for none. The planner takes fewer where rows or pages
        are short, or where the request could not emit as many tokens. A draft that is semantics is not asked for."""
        ...


class Configured:
    """As deep as the request asks for, at every load."""

    def depth(self, request: Request) -> int:
        return len(request.rows_by_depth) - 1


def worth_drafting(policy: DepthPolicy, request: Request) -> int:
    """Levels that the policy allows and from which a token could still be emitted."""
    allowed = policy.depth(request)
    assert allowed >= 0, f"a depth policy allowed {allowed} levels"
    return min(allowed, useful_depth(request))
