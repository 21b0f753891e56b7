"""Connections that occupy shared resources: connection slots, memory, descriptors, the log."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from attacks.raw import address_of, connect, connected, head, request, rest, send, status
from support.doubles.server import PROMPT, Served, gauges, offline, serving, settle, until

MIB = 1 << 20
PLACES = 48
OPTIONS = (
    *("--max-connections", str(PLACES), "--timeout-head", "1.5", "--timeout-body-idle", "1.5", "--timeout-body", "4"),
    *("--timeout-keep-alive", "2", "--max-body-mib", "4", "--max-buffered-mib", "16"),
)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("narrow"), *OPTIONS) as served:
        yield served
        settle(served)
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def memory(served: Served) -> float:
    """MiB of the HTTP process."""
    size: int = psutil.Process(served.process.pid).memory_info().rss
    return size / MIB


def descriptors(served: Served) -> int:
    count: int = psutil.Process(served.process.pid).num_fds()
    return count


def honest(served: Served, within: float = 10.0) -> None:
    """A request beside the attackers gets the same output as alone, and soon."""
    [expected] = offline([PROMPT], temperature=0, max_tokens=12)
    began = time.monotonic()
    with served.openai() as client:
        answer = client.completions.create(model="built-in", prompt=PROMPT, temperature=0, max_tokens=12)
    assert answer.choices[0].text == expected.text
    assert time.monotonic() - began < within


def test_a_head_without_end(narrow: Served) -> None:
    """Answered with 431 once the limit of a head is reached, however much more is sent."""
    address, before = address_of(narrow.url), memory(narrow)
    for _ in range(8):
        with connect(address) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
            taken = [send(connection, b"y" * 65536) for _ in range(200)]
            assert status(rest(connection)) == 431 or not all(taken)
    assert memory(narrow) - before < 40
    honest(narrow)


@pytest.mark.parametrize("line", ["x: " + "y" * 70_000, "\r\n".join(f"x{i}: y" for i in range(400))])
def test_a_head_too_large(narrow: Served, line: str) -> None:
    address = address_of(narrow.url)
    with connect(address) as connection:
        connection.sendall(head(address, None, "GET /health", line))
        answer = rest(connection) or b""
    assert status(answer) == 431 and b"h11_max_incomplete_event_size" in answer
    assert set(json.loads(answer.split(b"\r\n\r\n")[1])["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b"\r\n"])
def test_heads_half_sent(narrow: Served, sent: bytes) -> None:
    """Six times the connection limit: the ones waiting longest are closed, an honest request is served at once beside
    them, and all are closed soon after."""
    address = address_of(narrow.url)
    until("old connections are gone", lambda: descriptors(narrow) < PLACES, 10)
    with connected(address, 6 * PLACES) as connections:
        for connection in connections:
            send(connection, sent)
        until("no more connections than allowed are open", lambda: descriptors(narrow) < PLACES + 64, 3)
        honest(narrow)
        assert all(status(rest(connection, 6)) in (0, 408) for connection in connections)


def test_bodies_half_sent(narrow: Served) -> None:
    """They get 408 and their memory is freed, whether the client stops sending or trickles bytes."""
    address = address_of(narrow.url)
    with connected(address, PLACES - 8) as connections:
        for connection in connections:
            connection.sendall(head(address, MIB) + b'{"prompt": "' + b"x" * 100_000)
        honest(narrow)
        trickling, began = connections[0], time.monotonic()
        while send(trickling, b"x") and time.monotonic() - began < 8:
            time.sleep(0.2)
        assert 3 < time.monotonic() - began < 7
        assert {status(rest(connection, 2)) for connection in connections[1:]} == {408}
    honest(narrow)


def test_more_bodies_than_memory(narrow: Served) -> None:
    """40 MiB where 16 may be buffered: the largest holders are closed, and small requests are not among them."""
    address, before = address_of(narrow.url), memory(narrow)
    with connected(address, 12) as connections:
        body = b'{"prompt": "' + b"x" * (3 * MIB + 400_000)
        for connection in connections:
            send(connection, head(address, 4 * MIB - 100) + body)
        assert memory(narrow) - before < 60
        honest(narrow)
        ends = [status(rest(connection, 6)) for connection in connections]
        assert ends.count(0) >= 6 and set(ends) <= {0, 408}
    honest(narrow)


def test_an_idle_connection(narrow: Served) -> None:
    """Closed in time, even if it is kept awake with line ends."""
    address = address_of(narrow.url)
    for drop in (b"", b"\r\n"):
        with connect(address) as connection:
            connection.sendall(head(address, None, "GET /health"))
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
            while drop and send(connection, drop) and time.monotonic() - began < 8:
                time.sleep(0.1)
            assert rest(connection, 5) is not None
            assert time.monotonic() - began < 5


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_too_large(narrow: Served, announced: bool) -> None:
    """413, which the client can read although it was still sending; then the connection is closed."""
    address = address_of(narrow.url)
    piece = b"x" * 65536
    with connect(address) as connection:
        if announced:
            connection.sendall(head(address, 64 * MIB))
            sent = [send(connection, piece) for _ in range(40)]
        else:
            connection.sendall(head(address, None, "POST /v1/completions", "transfer-encoding: chunked"))
            sent = [send(connection, b"10000\r\n" + piece + b"\r\n") for _ in range(80)]
        answer = rest(connection, 6)
    assert all(sent) and status(answer) == 413 and b"connection: close" in (answer or b"")


def test_an_answer_before_the_body(narrow: Served) -> None:
    """The rest of a body that is already refused is not read indefinitely."""
    address = address_of(narrow.url)
    with connect(address) as connection:
        connection.sendall(head(address, 3 * MIB, "POST /nowhere"))
        began = time.monotonic()
        while send(connection, b"x" * 1000) and time.monotonic() - began < 10:
            time.sleep(0.05)
        assert time.monotonic() - began < 6


def test_many_requests_at_once(narrow: Served) -> None:
    """Thousands of requests in one write: the connection is closed, and no other client waits for them."""
    address = address_of(narrow.url)
    with connect(address) as connection:
        send(connection, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 6000)
        assert rest(connection, 6) is not None
    honest(narrow)


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_pipelined_requests_whose_client_leaves(narrow: Served, stream: bool, reset: bool) -> None:
    """The request that is being answered is aborted, those after it never begin, and nothing is logged of it."""
    address, before, size = address_of(narrow.url), gauges(narrow), narrow.log.stat().st_size
    body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": stream}
    with narrow.standing_still():
        connection = connect(address)
        connection.sendall(request(address, body) * 4)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.5)  # so that the first, at most, is on its way to the engine
        connection.close()
        time.sleep(0.5)
    after = settle(narrow, 30)
    assert after["stride_generation_tokens_total"] - before["stride_generation_tokens_total"] < 450
    assert b"Traceback" not in narrow.log.read_bytes()[size:]
    honest(narrow)


def test_no_descriptor_for_a_client(tmp_path: Path) -> None:
    """At the descriptor limit the server neither spins nor floods its log, and serves again once some are free."""
    with serving(tmp_path, "--timeout-head", "2") as served:
        server, address = psutil.Process(served.process.pid), address_of(served.url)
        before = server.rlimit(psutil.RLIMIT_NOFILE)
        server.rlimit(psutil.RLIMIT_NOFILE, (descriptors(served) + 20, before[1]))
        busy, size = sum(server.cpu_times()[:2]), served.log.stat().st_size
        with connected(address, 100) as connections:
            for connection in connections:
                send(connection, request(address, {"prompt": PROMPT, "max_tokens": 1})[:-1])
            time.sleep(6)
            spent = sum(server.cpu_times()[:2]) - busy
            server.rlimit(psutil.RLIMIT_NOFILE, before)
        assert spent < 2.5 and served.log.stat().st_size - size < 20_000
        honest(served, 20)
        assert served.stop() == 0
