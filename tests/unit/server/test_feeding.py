"""Connections take turns at the parser, and the loop goes on in between."""

from __future__ import annotations

import asyncio

import pytest

from stridelm.server import feeding
from stridelm.server.feeding import Feeder


class Received:
    """A connection that has received some pieces."""

    def __init__(self, name: str, pieces: int, events: list[str]) -> None:
        self.name, self.pieces, self.events = name, pieces, events

    def feed(self) -> bool:
        self.events.append(self.name)
        self.pieces -= 1
        if self.name == "broken":
            raise RuntimeError("not a client's fault")
        return self.pieces > 0


def events_of(**pieces: int) -> list[str]:
    """The order in which connections are fed, with `-` wherever the loop went on."""

    async def fed() -> list[str]:
        events: list[str] = []
        feeder, loop = Feeder(), asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        for name, count in pieces.items():
            feeder.add(Received(name, count, events))
        while len(events) - events.count("-") < sum(pieces.values()):
            await asyncio.sleep(0)
            events.append("-")
        return events

    return asyncio.run(asyncio.wait_for(fed(), 60))


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long slice or a short one, each connection is fed one piece before any is fed its next."""
    monkeypatch.setattr(feeding, "SLICE_S", -1.0)
    assert [one for one in events_of(a=3, b=1, c=2) if one != "-"] == ["a", "b", "c", "a", "c", "a"]
    monkeypatch.setattr(feeding, "SLICE_S", 60.0)
    assert [one for one in events_of(a=3, b=1, c=2) if one != "-"] == ["a", "b", "c", "a", "c", "a"]


def test_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a slice is over, the loop's other callbacks run before the next piece."""
    monkeypatch.setattr(feeding, "SLICE_S", -1.0)
    assert "".join(events_of(a=2, b=2)).replace("--", "-").strip("-") == "a-b-a-b"


def test_a_failure_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """If feeding one connection raises, the others are still fed."""
    monkeypatch.setattr(feeding, "SLICE_S", -1.0)
    assert [one for one in events_of(broken=1, a=2) if one != "-"] == ["broken", "a", "a"]
