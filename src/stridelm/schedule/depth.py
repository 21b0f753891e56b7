"""How deep to draft: decided once per step, by the planner, and nowhere else.

A policy sees the requests of a plan and nothing of the device. It knows times, which differ from rank to rank, so one
rank plans for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stridelm.schedule.depth_figures import Choice
from stridelm.schedule.step_shape import shape_of
from stridelm.types import Request, Span

if TYPE_CHECKING:
    from stridelm.schedule.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Others:
    """What a step has beside the requests whose depths are asked for."""

    asked: int = 0
    """Requests that were asked for before: those that end a prompt come last, once it is known how far prompts get."""
    reads: bool = False
    """The step may read prompts."""
    joining: int = 0
    """How many more will soon decode, if the step goes on with a prompt: those whose prompts are read, and those that
    wait and for which there are slots. The same whenever a plan asks."""


NOBODY = Others()


class DepthPolicy(Protocol):
    @property
    def cost(self) -> StepCost | None:
        """What steps take, learnt from those that land; None if it is not learnt."""
        ...

    @property
    def rests(self) -> bool:
        """Whether nothing is to be drafted in the next step, if it is for the same requests as the last: nobody need
        look for anything to draft."""
        ...

    def drafts(self, requests: int) -> bool:
        """Whether anything is drafted for so many requests, as things stand."""
        ...

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        """Maximum levels of each request's next draft, 0 for none. The planner uses fewer if rows or pages are short,
        or if a request could not emit as many tokens. Never asked for `all_or_nothing` requests.

        Called while a plan is made: must not change state that another call would see.
        """
        ...

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
        """A step of these spans has landed. Steps land in order, but later ones may have been planned before.

        accepted: levels of each span's draft that were. seconds: for how long the device was busy with the step.
        """
        ...

    def clear(self) -> None:
        """Forget all that was learnt."""
        ...

    def explain(self, requests: Sequence[Request], prompt: int = 0) -> Choice | None:
        """What `depths` returned for these requests, and why; None if it was not chosen. prompt: rows of prompts that
        the step has beside them."""
        ...


class Configured:
    """Each request's own depth, at every load."""

    cost: StepCost | None = None
    rests = False

    def __init__(self, cost: StepCost | None = None) -> None:
        """cost: by default, what steps take is not learnt."""
        self.cost = cost

    def drafts(self, requests: int) -> bool:
        return True

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [len(request.rows_by_depth) - 1 for request in requests]

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
        if self.cost is not None:
            self.cost.note(shape_of(spans), seconds)

    def clear(self) -> None:
        if self.cost is not None:
            self.cost.clear()

    def explain(self, requests: Sequence[Request], prompt: int = 0) -> Choice | None:
        return None
