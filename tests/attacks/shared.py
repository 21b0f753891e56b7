"""Everything that clients of one server share, and how it is known that none of them can keep it from another.

A new queue, pool, limit or cache of the server belongs here, and into the table of docs/operations.md: the test beside
this file finds those that are missing.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from attacks.raw import Address, connect, head, rest, send, status
from support.doubles.server import PROMPT, Served, until

MIB = 1 << 20
PLACES, CONNECTIONS, BUFFERED_MIB = 256, 128, 16
OPTIONS = (
    *("--no-strict", "--max-queue", str(PLACES), "--max-connections", str(CONNECTIONS)),
    *("--max-buffered-mib", str(BUFFERED_MIB)),
)
FULL = "it is full"
"""What is waited for before the honest client's requests."""
HONEST = 5
"""Requests of the honest client, one after another."""
Sent = tuple[str, dict[str, Any]]
"""A request's path and body."""


@dataclass(frozen=True)
class Client:
    """Who sends: a key, or where there are none an address."""

    key: str | None = None
    address: str = "127.0.0.1"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}

    def connection(self, served: Address) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*served, timeout=120, source_address=(self.address, 0))


@dataclass(frozen=True)
class Clients:
    hostile: tuple[Client, ...]
    honest: Client


KEYS = Clients((Client("hostile"), Client("accomplice")), Client("honest"))
ADDRESSES = Clients((Client(address="127.0.0.2"),), Client())
Law = Callable[[Served, Clients], None]


@dataclass(frozen=True)
class Competition:
    """Hostile clients keep as many connections busy with requests as they can, until they are told 429 or 503; the
    honest one's are all served, and before most of those that came first. senders: connections of each hostile
    client."""

    hostile: Callable[[int], Sent]
    honest: Callable[[int], Sent]
    senders: int

    def __call__(self, served: Served, clients: Clients) -> None:
        address = served.url.removeprefix("http://").split(":")
        with _Crowd(self, (address[0], int(address[1])), clients.hostile) as crowd:
            until(FULL, lambda: crowd.refusals > 0)
            for number in range(HONEST):
                before = frozenset(crowd.waiting)
                status = _ask(clients.honest.connection(crowd.address), clients.honest, self.honest(number))
                assert status == 200, status
                overtaken = len(before & crowd.served)
                assert overtaken <= len(before) / 2, (overtaken, len(before))


class _Crowd:
    """The hostile clients' threads. waiting: numbers of requests that are not answered yet; served: of those that got
    200."""

    def __init__(self, competition: Competition, address: Address, clients: tuple[Client, ...]) -> None:
        self.address = address
        self.waiting: set[int] = set()
        self.served: set[int] = set()
        self.refusals = 0
        self._numbers = itertools.count()
        self._end = threading.Event()
        self._connections: set[http.client.HTTPConnection] = set()
        senders = [client for client in clients for _ in range(competition.senders)]
        self._threads = [threading.Thread(target=self._send, args=(competition, client)) for client in senders]

    def __enter__(self) -> _Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for connection in list(self._connections):
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _send(self, competition: Competition, client: Client) -> None:
        while not self._end.is_set():
            number = next(self._numbers)
            connection = client.connection(self.address)
            self._connections.add(connection)
            self.waiting.add(number)
            try:
                answer = _ask(connection, client, competition.hostile(number))
            except (OSError, http.client.HTTPException):  # closed for another
                answer = 0
            finally:
                self._connections.discard(connection)
            if answer == 200:
                self.served.add(number)
            self.waiting.discard(number)
            if answer in (429, 503):
                self.refusals += 1
                self._end.wait(0.05)


def _ask(connection: http.client.HTTPConnection, client: Client, sent: Sent) -> int:
    path, body = sent
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **client.headers})
        response = connection.getresponse()
        response.read()
    finally:
        connection.close()
    return response.status


def _text(characters: int) -> Callable[[int], Sent]:
    return lambda number: ("/tokenize", {"prompt": (f"{number} = 1\n" * characters)[:characters]})


def _word(who: str) -> Callable[[int], Sent]:
    """A request with a grammar that is new."""
    return lambda number: (
        "/v1/completions",
        {"prompt": "x", "guided_choice": [f"{who} {number}"], "max_tokens": 30},
    )


def _samples(n: int, tokens: int) -> Callable[[int], Sent]:
    return lambda _: (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "n": n, "temperature": 1},
    )


def _uploads(served: Served, clients: Clients) -> None:
    """Hostile clients' bodies that are never complete take all the memory; the honest one's, which is the largest of
    all, arrives."""
    host, port = served.url.removeprefix("http://").split(":")
    address = host, int(port)
    size = 3 * MIB
    body = b'{"prompt": "' + b"x" * size + b'"}'
    with connect(address, 60) as honest:
        assert send(honest, _head(address, clients.honest, len(body)) + body[: size - MIB])
        with _half_sent(address, clients.hostile, 2 * BUFFERED_MIB, MIB) as hostile:
            until("some are closed", lambda: any(_closed(one) for one in hostile))
            assert send(honest, body[size - MIB :])
            assert status(rest(honest, 60)) == 400  # read to its end: it is longer than the context


@contextmanager
def _half_sent(address: Address, clients: tuple[Client, ...], count: int, size: int) -> Iterator[list[socket.socket]]:
    connections = [(connect(address, 60), client) for _, client in zip(range(count), itertools.cycle(clients))]
    try:
        for connection, client in connections:
            send(connection, _head(address, client, 4 * size) + b'{"prompt": "' + b"x" * size)
        yield [connection for connection, _ in connections]
    finally:
        for connection, _ in connections:
            connection.close()


def _closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return not connection.recv(1 << 16)
    except TimeoutError:
        return False
    except OSError:
        return True


def _head(address: Address, client: Client, length: int) -> bytes:
    lines = [f"{name}: {value}" for name, value in client.headers.items()]
    return head(address, length, "POST /v1/completions", "connection: close", *lines)


@dataclass(frozen=True)
class Shared:
    """files: of the server, which make it. limits: options that limit it. law: run with hostile and honest clients; or
    the test that says it, as FILE::NAME; None for what costs others at most some speed."""

    name: str
    files: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    law: Law | str | None = None


SHARED = (
    Shared(
        "connections",
        ("limits.py", "protocol.py"),
        ("max_connections",),
        Competition(_samples(1, 400), _samples(1, 1), CONNECTIONS),
    ),
    Shared("memory of requests and unread answers", ("limits.py", "protocol.py"), ("max_buffered_mib",), _uploads),
    Shared(
        "open samples",
        ("service.py", "engine_process.py"),
        ("max_queue", "max_queue_per_key"),
        Competition(_samples(PLACES // 4, 400), _samples(4, 1), 4),
    ),
    Shared(
        "samples that run, and their pages",
        law="attacks/test_attack_places.py::test_a_client_that_fills_every_slot_blocks_no_other",
    ),
    Shared(
        "workers for large bodies",
        ("service.py", "workers/pool.py"),
        law=Competition(_text(45_000), _text(35_000), 80),
    ),
    Shared(
        "workers for grammars",
        ("grammar_sandbox.py", "workers/pool.py"),
        law=Competition(_word("hostile"), _word("honest"), 30),
    ),
    Shared(
        "threads for short texts",
        ("service.py",),
        law="unit/server/test_fair_line.py::test_who_holds_nothing_is_served_within_a_round",
    ),
    Shared(
        "the engine's compiler of grammars",
        ("compile_line.py",),
        law="unit/server/test_compile_line.py::test_no_submission_waits_for_all_of_another_tenants",
    ),
    Shared(
        "grammars that have passed, compiled grammars",
        ("grammar_sandbox.py", "compile_line.py"),
        law="unit/grammar/test_grammar_cache.py::test_nobody_evicts_what_another_uses",
    ),
    Shared(
        "the event loop, for requests as they arrive",
        ("feeding.py",),
        law="unit/server/test_feeding.py::test_turns",
    ),
    Shared(
        "the event loop, for long answers",
        ("turns.py",),
        law="unit/server/test_turns.py::test_long_answers_take_turns_by_tenant",
    ),
    Shared(
        "the event loop, for output as it comes",
        ("deliveries.py",),
        law="unit/server/test_turns.py::test_deliveries_take_turns_by_tenant",
    ),
    Shared(
        "names of requests (`rid`)",
        ("sglang/rids.py",),
        law="attacks/test_attack_roles.py::test_abort",
    ),
    Shared("`/health_generate`", ("sglang/probe.py",), law="attacks/test_attack_health.py::test_one_probe_for_all"),
    Shared("`/metrics`", ("metrics.py", "frontends/totals.py", "shared.py")),
    Shared("KV events, for routers", ("kv_events.py",)),
    Shared("messages between the processes", ("engine_client.py", "inbox.py", "outlets.py", "frontends/channel.py")),
    Shared(
        "time of the engine for masks", law="unit/grammar/test_share.py::test_beside_another_masks_have_their_share"
    ),
    Shared("cached prefixes, learnt drafts"),
)
NOT_SHARED = {
    "generation.py": "one request's output",
    "sglang/response.py": "one request's output",
    "fair_line.py": "the lines themselves",
    "http.py": "tidying",
    "run.py": "the start",
    "supervisor.py": "the engine's process",
    "frontends/fleet.py": "front-end processes",
}
"""Files of the server with queues and the like that no two clients share, and what they are for."""
PER_REQUEST = {
    *("max_body_mib", "max_unread_mib", "max_repeating_mib", "max_prompt_scores", "max_restarts"),
    *("max_depth", "max_draft_rows"),
}
"""Limits that are not shared."""
