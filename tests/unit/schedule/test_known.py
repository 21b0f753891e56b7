"""Places of requests in the table of a depth policy."""

from __future__ import annotations

from stridelm import SamplingParams
from stridelm.params import Speculation
from stridelm.schedule.adaptive import Adaptive
from stridelm.schedule.known import UNDECIDED, Known
from stridelm.types import Request, Span


def request(rows: tuple[int, ...] = (0, 1, 2), drafter: str = "mtp", **params: float) -> Request:
    return Request("", [0], SamplingParams(**params), Speculation(drafter=drafter), rows, adaptive=True)  # type: ignore[arg-type]


def test_each_has_a_place_of_its_own_and_keeps_it() -> None:
    """Also when the table grows, and whoever is asked for in between."""
    known, many = Known(), [request() for _ in range(200)]
    first = known.places(many[:3]).tolist()
    known.requests_P["fortune"][first] = [0.1, 0.2, 0.3]
    all_of_them = known.places(many).tolist()
    assert len(set(all_of_them)) == 200 and all_of_them[:3] == first
    assert known.places(many[2:0:-1]).tolist() == first[2:0:-1]
    assert known.requests_P["fortune"][first].tolist() == [0.1, 0.2, 0.3]


def test_a_place_is_free_once_nothing_refers_to_its_request() -> None:
    """A step in flight still does: what it teaches must not be taken for another request's."""
    known, gone, stays = Known(), request(), request()
    place, _ = known.places([gone, stays]).tolist()
    flight = Span(gone, 0, 1)
    known.requests_P["fortune"][place] = 3.0
    del gone
    known.places([stays])
    other = request()
    assert known.places([stays, other])[1] != place
    del flight
    young = request()
    assert known.places([young])[0] == place
    assert known.requests_P["fortune"][place] == 0.0 and known.requests_P["depth"][place] == UNDECIDED


def test_places_do_not_grow_with_requests_that_came_and_went() -> None:
    policy = Adaptive()
    for _ in range(300):
        pair = [request(), request()]
        depths = policy.depths(pair)
        spans = [Span(each, 0, 1, depth, depth) for each, depth in zip(pair, depths, strict=True)]
        policy.landed(spans, depths, 0.01)
    assert len(policy.acceptance.known.requests_P) == 64


def test_rows_of_a_deeper_request_extend_those_of_all() -> None:
    known = Known()
    shallow, deep = known.places([request((0, 1)), request((0, 2, 6, 9), "medusa")]).tolist()
    assert known.rows_PD[[shallow, deep]].tolist() == [[0, 1, 1, 1], [0, 2, 6, 9]]
    assert known.requests_P["levels"][[shallow, deep]].tolist() == [1, 3]
    assert known.requests_P["drafter"][[shallow, deep]].tolist() == [0, 1]


def test_forgetting_keeps_places() -> None:
    known, one = Known(), request(target_tps=5.0)
    [place] = known.places([one]).tolist()
    known.requests_P["checks"][place], known.requests_P["depth"][place] = 4, 2
    known.forget()
    assert known.places([one]).tolist() == [place] and known.paced
    assert known.requests_P["checks"][place] == 0 and known.requests_P["depth"][place] == UNDECIDED
