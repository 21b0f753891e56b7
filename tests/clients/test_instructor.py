"""instructor, in a process of its own."""

from __future__ import annotations

from clients.asked import Place
from clients.programs import python_client
from support.doubles.server import Served


def test_every_mode(served: Served) -> None:
    found = python_client("instructor", served.url)
    assert len(found) == 6
    for name, place in found.items():
        assert Place(**place), name
