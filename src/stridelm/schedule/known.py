"""What is known of requests whose depths are chosen, as one array: compiled loops read it, and the host makes one pass
over a step's requests, to see where they are.

A request gets its place when it is first seen, with what does not change while it runs, and keeps it while it is
preempted. The place is given to another once the request is gone from the queue and from all steps in flight. A request
is known to one policy.

Legend: P places, R requests, D levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stridelm.schedule.urgency import weight
from stridelm.types import Request, Ticket

OF_ONE = np.dtype(
    [
        ("drafter", np.int64),
        ("levels", np.int64),
        ("adaptive", np.bool_),
        ("weight", np.float64),
        ("fortune", np.float64),
        ("checks", np.int64),
        ("depth", np.int64),
        ("most", np.int64),
        ("least", np.float64),
    ],
    align=True,
)
"""drafter: its number. levels: that it may draft. adaptive: fewer may be chosen. weight: what its tokens count for
(schedule/urgency.py). fortune: how much likelier its drafts are to be accepted than those of others, as log-odds
(schedule/acceptance.py). checks: levels of its drafts that were checked so far. depth: levels that it is to draft; -1
before that was decided. most, least: by what that was decided, as in depth_figures.Pick."""
UNDECIDED = -1


class Known:
    """Not thread-safe."""

    def __init__(self) -> None:
        self.requests_P = np.zeros(0, dtype=OF_ONE)
        self.rows_PD = np.zeros((0, 1), dtype=np.int64)
        """Draft rows at each depth; those of the deepest, beyond it."""
        self.chances_PD = np.zeros((0, 0))
        """Of each level to be reached and accepted, when the depth was decided."""
        self.drafters: dict[str | None, int] = {}
        """Their numbers, in order of appearance."""
        self.paced = False
        """Whether any request ever had a target rate."""
        self._free: list[int] = []
        self._latest: tuple[list[Request], np.ndarray] = [], np.zeros(0, dtype=np.int64)
        """What was asked last, and the answer: most steps are for the same requests as the one before."""

    @property
    def levels(self) -> int:
        """Most that any request may draft."""
        return self.rows_PD.shape[1] - 1

    def places(self, requests: Sequence[Request]) -> np.ndarray:
        """[R] int64: where they are."""
        if self._latest[0] == requests:
            return self._latest[1]
        try:
            found = [request.ticket.index for request in requests]  # type: ignore[union-attr]
        except AttributeError:
            found = [self.place(request) for request in requests]
        self._latest = list(requests), np.fromiter(found, np.int64, len(found))
        return self._latest[1]

    def forget(self) -> None:
        """What was learnt of requests. Their places stay."""
        self.requests_P["fortune"], self.requests_P["checks"], self.requests_P["depth"] = 0.0, 0, UNDECIDED
        self.requests_P["most"] = 0

    def weigh(self, request: Request) -> None:
        """Its tokens may count for more or for less now."""
        assert request.ticket is not None
        self.requests_P["weight"][request.ticket.index] = weight(request)

    def place(self, request: Request) -> int:
        """Where it is, now if it was not seen before."""
        if request.ticket is not None:
            return request.ticket.index
        if not self._free:
            self._grow()
        rows, drafter = request.rows_by_depth, request.speculation.drafter
        request.ticket = Ticket(self._free.pop(), self._free)
        place, levels = request.ticket.index, len(rows) - 1
        number = self.drafters.setdefault(drafter, len(self.drafters))
        self.requests_P[place] = (number, levels, request.adaptive, weight(request), 0.0, 0, UNDECIDED, 0, 0.0)
        if levels > self.levels:
            self.chances_PD = np.pad(self.chances_PD, ((0, 0), (0, levels - self.levels)))
            self.rows_PD = np.pad(self.rows_PD, ((0, 0), (0, levels - self.levels)), mode="edge")
        self.rows_PD[place, : levels + 1], self.rows_PD[place, levels + 1 :] = rows, rows[-1]
        self.paced |= request.params.target_tps is not None
        return place

    def _grow(self) -> None:
        """Twice as many places."""
        before = len(self.requests_P)
        more = max(64, before)
        self.requests_P = np.pad(self.requests_P, (0, more))
        self.rows_PD = np.pad(self.rows_PD, ((0, more), (0, 0)))
        self.chances_PD = np.pad(self.chances_PD, ((0, more), (0, 0)))
        self._free += reversed(range(before, before + more))
