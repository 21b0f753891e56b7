"""A server that other people's clients talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.doubles.server import Served, serving, settle


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("clients"), "--max-model-len", "2048") as served:
        yield served
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


@pytest.fixture
def served(_server: Served) -> Iterator[Served]:
    """The server; afterwards nothing is running."""
    yield _server
    assert settle(_server)["stride_requests_running"] == 0
