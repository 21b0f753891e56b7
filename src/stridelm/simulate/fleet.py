"""Cards that share a load, as events: a request arrives, a step lands, a step is due."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stridelm.bench.serving.record import Completion, Run
from stridelm.simulate.card import Card
from stridelm.simulate.workload import Job
from stridelm.types import Request

Route = Callable[[Sequence[Card], int], int]
"""From the cards and the number of a request to the card that it is sent to."""


def least_outstanding(cards: Sequence[Card], number: int) -> int:
    """The card with the fewest requests that have not finished, the first of several."""
    return min(range(len(cards)), key=lambda place: cards[place].outstanding)


def round_robin(cards: Sequence[Card], number: int) -> int:
    """One card after the other."""
    return number % len(cards)


ROUTES: dict[str, Route] = {"least-outstanding": least_outstanding, "round-robin": round_robin}
ARRIVAL, DUE = -1, -2
"""The events that a request arrives, and that a step of the first card is due; DUE minus a place is another card's. All
other events are places of cards whose oldest step lands."""


@dataclass(slots=True)
class _Sent:
    """A request on its way."""

    request: Request
    since: float
    at: list[float] = field(default_factory=list)
    """When each of its events came, in seconds after it was sent."""

    def completion(self) -> Completion:
        request, stats = self.request, self.request.stats
        return Completion(
            at=self.at,
            tokens=len(request.output_ids),
            prompt_tokens=len(request.prompt_ids),
            text="",
            steps=stats.steps,
            drafted=stats.drafted,
            accepted=stats.accepted,
            finish_reason="length",
        )


class Fleet:
    """Several runs may follow one another: what the cards' policies have learnt stays."""

    def __init__(self, cards: Sequence[Card], route: Route = least_outstanding) -> None:
        self.cards, self._route = cards, route
        self._events: list[tuple[float, int, int]] = []
        """(time, order, what)."""
        self._pushed = 0
        self._waiting: set[int] = set()
        """Places of cards that plan their next step later, or once a request arrives."""

    def run(self, jobs: Sequence[Job], streams: int | None = None, arrivals: Sequence[float] | None = None) -> Run:
        """Complete all jobs: `streams` at a time, or as they arrive, which is when `arrivals` says, in seconds after
        the beginning. The cards are idle before and after. Raises ValueError for a job that does not fit on a card."""
        assert (streams is None) != (arrivals is None) and not any(card.flights for card in self.cards)
        for time in [0.0] * min(streams, len(jobs)) if arrivals is None and streams else arrivals or ():
            self._push(time, ARRIVAL)
        sent: list[_Sent] = []
        by_request: dict[Request, _Sent] = {}
        left = len(jobs) - len(self._events)
        last = 0.0
        while self._events:
            now, ready = self._events[0][0], dict[int, None]()
            while self._events and self._events[0][0] == now:
                what = heapq.heappop(self._events)[2]
                if what == ARRIVAL:
                    place, number = self._route(self.cards, len(sent)), len(sent)
                    request = self.cards[place].add(str(number), jobs[number])
                    sent.append(_Sent(request, now))
                    by_request[request] = sent[-1]
                    if place in self._waiting or not self.cards[place].flights:
                        ready[place] = None  # otherwise its host waits for a step to land
                    continue
                if what <= DUE:
                    if DUE - what in self._waiting:
                        self._launch(DUE - what, now)
                    continue
                ready[what] = None
                for emission in self.cards[what].land():
                    last, each = now, by_request[emission.request]
                    each.at.append(now - each.since)
                    if emission.finished and left:
                        left -= 1
                        self._push(now, ARRIVAL)
            for place in ready:
                due = self.cards[place].due(now) if arrivals is not None and len(sent) < len(jobs) else now
                if due > now:
                    self._waiting.add(place)
                    self._push(due, DUE - place)
                else:
                    self._launch(place, now)
        for card in self.cards:
            card.check()
        return Run(last, tuple(each.completion() for each in sent))

    def _launch(self, place: int, now: float) -> None:
        self._waiting.discard(place)
        for flight in self.cards[place].launch(now):
            self._push(flight.ends, place)

    def _push(self, time: float, what: int) -> None:
        heapq.heappush(self._events, (time, self._pushed, what))
        self._pushed += 1
