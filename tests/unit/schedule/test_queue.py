"""The queue: order of service, slots, and all operations that add and remove requests."""

from __future__ import annotations

import pytest

from stridelm.params import SamplingParams, Speculation
from stridelm.schedule import Queue
from stridelm.types import Request, Status, StepPlan


def request(name: str, arrival: int = 0, priority: int = 0) -> Request:
    return Request(name, [1, 2], SamplingParams(), Speculation(), priority=priority, arrival=arrival)


def ids(requests: object) -> list[str]:
    return [item.id for item in requests]  # type: ignore[attr-defined]


def test_waiting_is_in_order_of_rank() -> None:
    queue = Queue(2)
    for item in (request("c", 3), request("a", 1), request("urgent", 9, -1), request("b", 2)):
        queue.add(item)
    assert ids(queue.waiting) == ["urgent", "a", "b", "c"] and len(queue) == 4


def test_admission_gives_the_smallest_free_slot() -> None:
    queue = Queue(3)
    items = [request(name, i) for i, name in enumerate("abcd")]
    for item in items:
        queue.add(item)
    queue.apply(StepPlan(admitted=tuple(items[:3])))
    assert [item.slot for item in items] == [0, 1, 2, -1]
    queue.remove(items[2].id)
    queue.remove(items[0].id)
    queue.apply(StepPlan(admitted=(items[3],)))
    assert items[3].slot == 0 and items[0].slot == -1 and items[0].status is Status.FINISHED
    assert ids(queue.running) == ["b", "d"]


def test_preemption_returns_a_request_to_its_old_place() -> None:
    queue = Queue(2)
    a, b, c = (request(name, i) for i, name in enumerate("abc"))
    for item in (a, b, c):
        queue.add(item)
    queue.apply(StepPlan(admitted=(a, b)))
    queue.apply(StepPlan(preempted=(b,)))
    assert ids(queue.waiting) == ["b", "c"] and ids(queue.running) == ["a"]
    assert b.status is Status.WAITING and b.slot == -1 and b.stats.preemptions == 1


def test_remove_takes_from_either_side_once() -> None:
    queue = Queue(1)
    a, b = request("a", 0), request("b", 1)
    queue.add(a)
    queue.add(b)
    queue.apply(StepPlan(admitted=(a,)))
    assert queue.remove("a") is a and queue.remove("b") is b
    assert queue.remove("a") is None and queue.empty and a.slot == -1
    queue.add(request("a"))  # the id is free again
    assert "a" in queue and queue.get("a") is not a


def test_an_id_in_use_is_refused() -> None:
    queue = Queue(1)
    queue.add(request("a"))
    with pytest.raises(ValueError, match="'a' is in use"):
        queue.add(request("a"))


def test_requests_of_equal_rank_are_told_apart() -> None:
    queue = Queue(2)
    twins = [request("a"), request("b")]
    for item in twins:
        queue.add(item)
    assert queue.remove("b") is twins[1] and ids(queue.waiting) == ["a"]


def test_running_may_be_walked_while_requests_finish() -> None:
    queue = Queue(3)
    items = tuple(request(name, i) for i, name in enumerate("abc"))
    for item in items:
        queue.add(item)
    queue.apply(StepPlan(admitted=items))
    for item in queue.running:
        queue.remove(item.id)
    assert queue.empty
