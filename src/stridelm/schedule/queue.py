"""The waiting and the running requests, and their slots. Requests move between the two only here.

    add --> waiting --apply(admitted)--> running
               ^                            |
               +-----apply(preempted)-------+           remove: out, from either

A slot is the request's row in the device's request table, held from admission until the request leaves the running set.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence, Set

from stridelm.types import Request, Status, StepPlan


class Queue:
    """Waiting and running requests, both in order of rank; at most `slots` of them run."""

    def __init__(self, slots: int) -> None:
        assert slots > 0
        self._waiting: dict[str, list[Request]] = {}
        """Tenant -> its waiting requests, at least one, in order of rank."""
        self._running: list[Request] = []
        self._by_id: dict[str, Request] = {}
        self._free_slots = list(range(slots))  # ascending, so already a heap
        self.only: Set[Request] | None = None
        """The only requests that the planner may see, or None for all; the others wait."""

    @property
    def running(self) -> list[Request]:
        """Running requests in order of rank; a copy, so that the queue may change during iteration."""
        return list(self._running)

    @property
    def waiting(self) -> list[Request]:
        """Waiting requests in order of rank."""
        return list(heapq.merge(*self._waiting.values(), key=_rank))

    @property
    def plannable(self) -> Mapping[str, Sequence[Request]]:
        """Tenant -> its waiting requests that may be admitted, at least one, in order of rank; not copied, since there
        may be many."""
        if self.only is None:
            return self._waiting
        lines = {tenant: [r for r in line if r in self.only] for tenant, line in self._waiting.items()}
        return {tenant: line for tenant, line in lines.items() if line}

    @property
    def empty(self) -> bool:
        return not self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        """Waiting and running requests, by arrival. The queue may not change during iteration."""
        return iter(self._by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def add(self, request: Request) -> None:
        """Add a new request as waiting. Raises ValueError if its id is in use."""
        if request.id in self._by_id:
            raise ValueError(f"request id {request.id!r} is in use; choose another or wait until it finishes")
        assert request.status is Status.WAITING and request.slot == -1 and request.computed == 0
        self._by_id[request.id] = request
        self._wait(request)

    def apply(self, plan: StepPlan) -> None:
        """Move the plan's requests. The cache has already released the preempted ones, and not yet admitted the
        others."""
        for request in plan.preempted:
            assert request.status is Status.RUNNING and request.computed == 0
            _take(self._running, request)
            self._free(request)
            request.status = Status.WAITING
            request.stats.preemptions += 1
            self._wait(request)
        for request in plan.admitted:
            assert request.status is Status.WAITING and request.computed == 0
            self._unwait(request)
            request.slot = heapq.heappop(self._free_slots)
            request.status = Status.RUNNING
            insort(self._running, request, key=_rank)

    def remove(self, request_id: str) -> Request | None:
        """Remove a waiting or running request; None if there is none with this id (it may just have finished)."""
        request = self._by_id.get(request_id)
        if request is not None:
            self._drop(request)
        return request

    def _drop(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            _take(self._running, request)
            self._free(request)
        else:
            self._unwait(request)
        del self._by_id[request.id]
        request.status = Status.FINISHED

    def _wait(self, request: Request) -> None:
        insort(self._waiting.setdefault(request.tenant, []), request, key=_rank)

    def _unwait(self, request: Request) -> None:
        line = self._waiting[request.tenant]
        _take(line, request)
        if not line:
            del self._waiting[request.tenant]

    def _free(self, request: Request) -> None:
        heapq.heappush(self._free_slots, request.slot)
        request.slot = -1


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _take(requests: list[Request], request: Request) -> None:
    """Remove the request by identity, since several may share a rank."""
    index = bisect_left(requests, request.rank, key=_rank)
    while requests[index] is not request:
        index += 1
    del requests[index]
