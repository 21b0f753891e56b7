"""How deep to draft: decided once per step, by the planner, and nowhere else.

A policy sees the requests of a plan and nothing of the device, so that every rank that plans the same step chooses the
same depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stridelm.schedule.depth_figures import Choice
from stridelm.types import Request, Span


class DepthPolicy(Protocol):
    def depths(self, requests: Sequence[Request]) -> Sequence[int]:
        """Maximum levels of each request's next draft, 0 for none. The planner uses fewer if rows or pages are short,
        or if a request could not emit as many tokens. Never asked for `all_or_nothing` requests.

        Called while a plan is made: must not change state that another call would see.
        """
        ...

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float | None) -> None:
        """A step of these spans has landed. Steps land in order, but later ones may have been planned before.

        accepted: levels of each span's draft that were. seconds: how long the step took; None if it had prompt rows.
        """
        ...

    def clear(self) -> None:
        """Forget all that was learnt."""
        ...

    def explain(self, requests: Sequence[Request]) -> Choice | None:
        """What `depths` returned for these requests, and why; None if it was not chosen."""
        ...


class Configured:
    """Each request's own depth, at every load."""

    def depths(self, requests: Sequence[Request]) -> Sequence[int]:
        return [len(request.rows_by_depth) - 1 for request in requests]

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float | None) -> None:
        pass

    def clear(self) -> None:
        pass

    def explain(self, requests: Sequence[Request]) -> Choice | None:
        return None
