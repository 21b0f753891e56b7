"""Servers for all tests that leave them in their original state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.doubles.server import Served, serving, settle, until


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("server")) as served:
        yield served
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def detailed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its responses say of every step what was drafted and accepted."""
    with serving(tmp_path_factory.mktemp("detailed"), "--per-request-spec-decode-metrics", "detailed") as served:
        yield served
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    """The server; afterwards nothing is open or running, and it still responds."""
    yield server
    figures = settle(server)
    assert figures["stride_requests_running"] == 0
    with server.http() as client:
        until("no sample is open", lambda: client.get("/get_load").json()[0]["num_reqs"] == 0, 10)
        assert client.get("/health").status_code == 200
