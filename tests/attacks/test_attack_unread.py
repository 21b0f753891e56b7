"""Responses that the client does not read: they are held for a bounded time and up to a bounded size, then dropped."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from attacks.raw import Address, address_of, connect, request
from support.doubles.server import PROMPT, Served, offline, serving, settle, until

WIDE = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "logprobs": 20, "speculation": "off"}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--timeout-write", "2", "--max-unread-mib", "2")
    with serving(tmp_path_factory.mktemp("narrow"), *options) as served:
        yield served
        settle(served)
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def connections(served: Served, address: Address) -> int:
    """Connections that the server has open at its port."""
    found = psutil.Process(served.process.pid).net_connections(kind="tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == address[1] for one in found)


@pytest.mark.parametrize("stream", [True, False])
def test_never_read(narrow: Served, stream: bool) -> None:
    """The connection is closed and its samples end, although the client stays."""
    address = address_of(narrow.url)
    body = {**WIDE, "n": 2 if stream else 1, "max_tokens": 480 if stream else 300, "stream": stream}
    attackers = [connect(address, 60, window=4096) for _ in range(4)]
    for attacker in attackers:
        attacker.sendall(request(address, body))
    until("all are connected", lambda: connections(narrow, address) == 4, 10)
    until("all are closed", lambda: connections(narrow, address) == 0, 60)
    settle(narrow, 5)
    for attacker in attackers:
        attacker.close()


def test_a_slow_reader(narrow: Served) -> None:
    """A client that keeps reading, however slowly, gets everything."""
    [expected] = offline([PROMPT], temperature=0, max_tokens=300, ignore_eos=True)
    address = address_of(narrow.url)
    with connect(address, 30, window=4096) as connection:
        connection.sendall(request(address, {**WIDE, "temperature": 0, "max_tokens": 300, "stream": True}))
        received = bytearray()
        time.sleep(1)
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(16384)
            time.sleep(0.05)
    assert len(received) > 100_000
    words = [part.split(b'","logprobs"')[0] for part in received.split(b'"text":"')[1:]]
    assert b"".join(words).decode("unicode_escape") == expected.text


def test_an_answer_too_large(narrow: Served) -> None:
    """A non-streamed response is refused if it would exceed the bound, and the error names the option."""
    with narrow.http() as client:
        answer = client.post("/v1/completions", json={**WIDE, "n": 2})
    assert answer.status_code == 400 and "max_unread_mib" in answer.text
    settle(narrow, 5)
