"""/health_generate needs no key: it costs one probe, however many clients request it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attacks.raw import address_of, connected, head, rest, status
from support.doubles.server import Served, gauges, serving, settle

KEY = "open-sesame"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("keyed"), "--api-key", KEY, "--max-queue", "4") as served:
        yield served
        settle(served)
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def test_one_probe_for_all(keyed: Served) -> None:
    """Three hundred concurrent requests are all answered, and the engine generates a handful of tokens."""
    address, before = address_of(keyed.url), settle(keyed)["stride_engine_emitted_tokens_total"]
    with connected(address, 300) as connections:
        for connection in connections:
            connection.sendall(head(address, None, "GET /health_generate", "connection: close"))
        assert {status(rest(connection, 20)) for connection in connections} == {200}
    settle(keyed)
    assert gauges(keyed)["stride_engine_emitted_tokens_total"] - before <= 12


def test_clients_that_leave_do_not_end_the_probe(keyed: Served) -> None:
    address = address_of(keyed.url)
    with connected(address, 40) as connections:
        for connection in connections:
            connection.sendall(head(address, None, "GET /health_generate", "connection: close"))
        for connection in connections[::2]:
            connection.close()
        assert {status(rest(connection, 20)) for connection in connections[1::2]} == {200}
