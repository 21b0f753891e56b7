"""Order of service when several tenants share an engine.

A tenant's requests form a line: those running, then those waiting, each in order of rank. Requests of the same priority
are served by their place in their own tenant's line, and only then by arrival, so that a tenant with a thousand
requests goes before another only once the other has as many running. With one tenant this is order of rank.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from stridelm.types import Request

ServiceOrder = tuple[int, int, int]
"""Priority, place in the tenant's line, arrival: lower goes first."""


Served = list[tuple[ServiceOrder, Request]]
Newcomers = Iterator[tuple[ServiceOrder, Request]]


def in_turn(running: Sequence[Request], lines: Mapping[str, Sequence[Request]]) -> tuple[Served, Newcomers]:
    """The running and the waiting requests, both in order of service.

    running: in order of rank. lines: tenant -> its waiting requests, at least one, in order of rank; read only as far
    as newcomers are consumed.
    """
    places: Counter[str] = Counter()
    served: Served = []
    for request in running:
        served.append((_turn(request, places[request.tenant]), request))
        places[request.tenant] += 1
    served.sort(key=itemgetter(0))
    return served, _newcomers(places, lines)


def _newcomers(places: Counter[str], lines: Mapping[str, Sequence[Request]]) -> Newcomers:
    heads = []
    for tenant, line in lines.items():
        rest = iter(line)
        first = next(rest)
        heads.append((_turn(first, places[tenant]), tenant, first, rest))
    heapq.heapify(heads)
    while heads:
        turn, tenant, request, rest = heads[0]
        yield turn, request
        following = next(rest, None)
        if following is None:
            heapq.heappop(heads)
        else:
            places[tenant] += 1
            heapq.heapreplace(heads, (_turn(following, places[tenant]), tenant, following, rest))


def _turn(request: Request, place: int) -> ServiceOrder:
    return request.priority, place, request.arrival
