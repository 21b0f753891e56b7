"""All attacks by name, each a function of the server's address that runs its attack and returns.

The soak runs them beside honest streams (soak.py). An attack is bounded in time, to some seconds, and expects nothing
of the responses: the tests check what the server must do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress

from attacks.content_attacks import CONTENT_ATTACKS
from attacks.protocol_cases import CASES, data_of
from attacks.raw import Address, connect, connected, head, request, rest, send

Attack = Callable[[Address], None]
WIDE = {"prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "logprobs": 20, "n": 2}


def heads_without_end(address: Address) -> None:
    with connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
        while send(connection, b"y" * 65536):
            pass


def heads_half_sent(address: Address) -> None:
    with connected(address, 200) as connections:
        for connection in connections:
            send(connection, b"POST /generate HTTP/1.1\r\nhost: localhost\r\n")
        time.sleep(3)


def bodies_half_sent(address: Address) -> None:
    with connected(address, 50) as connections:
        for connection in connections:
            send(connection, head(address, 1 << 20) + b'{"prompt": "' + b"x" * 200_000)
        time.sleep(3)


def bodies_that_trickle(address: Address) -> None:
    with connected(address, 20) as connections:
        for connection in connections:
            send(connection, head(address, 1 << 20))
        for _ in range(15):
            for connection in connections:
                send(connection, b" ")
            time.sleep(0.2)


def bodies_too_large(address: Address) -> None:
    with connect(address) as connection:
        send(connection, head(address, None, "POST /generate", "transfer-encoding: chunked"))
        with suppress(OSError):
            while send(connection, b"10000\r\n" + b"x" * 65536 + b"\r\n"):
                pass
        rest(connection, 3)


def answers_never_read(address: Address) -> None:
    connections = [connect(address, 5, window=4096) for _ in range(4)]
    for number, connection in enumerate(connections):
        send(connection, request(address, {**WIDE, "stream": number % 2 == 0}))
    time.sleep(4)
    for connection in connections:
        connection.close()


def clients_that_leave(address: Address) -> None:
    draw = random.Random()
    for _ in range(60):
        message = request(address, {**WIDE, "stream": draw.random() < 0.5})
        with connect(address) as connection:
            send(connection, message[: draw.randint(1, len(message))] if draw.random() < 0.3 else message)
            connection.settimeout(0.02)
            with suppress(OSError):
                connection.recv(4096)


def probes(address: Address) -> None:
    with connected(address, 200) as connections:
        for connection in connections:
            send(connection, head(address, None, "GET /health_generate", "connection: close"))
        for connection in connections:
            rest(connection, 5)


def many_requests_at_once(address: Address) -> None:
    with connect(address) as connection:
        send(connection, head(address, None, "GET /health") * 4000)
        rest(connection, 5)


def no_valid_http(address: Address) -> None:
    for data in CASES.values():
        with suppress(OSError), connect(address, 3) as connection:
            send(connection, data_of(data, address))
            connection.settimeout(0.05)
            connection.recv(4096)


def lines_forged(address: Address) -> None:
    with connect(address) as connection:
        send(connection, head(address, None, "GET /%0AERROR%20forged%1b[2J" + "x" * 9000, "connection: close"))
        rest(connection, 5)


def others_aborted(address: Address) -> None:
    """A server without keys lets any client abort any request, so this aims at names that no request has."""
    for rid in ("g0.0", "g1.0", "*", "", "\x00"):
        with connect(address) as connection:
            send(connection, request(address, {"rid": rid}, "POST /abort_request"))
            connection.settimeout(5)
            with suppress(OSError):
                connection.recv(4096)


def _by_url(attack: Callable[[str], None]) -> Attack:
    return lambda address: attack(f"http://{address[0]}:{address[1]}")


ATTACKS: dict[str, Attack] = {
    function.__name__: function
    for function in (
        *(heads_without_end, heads_half_sent, bodies_half_sent, bodies_that_trickle, bodies_too_large),
        *(answers_never_read, clients_that_leave, probes, many_requests_at_once, no_valid_http),
        *(lines_forged, others_aborted),
    )
} | {name: _by_url(attack) for name, attack in CONTENT_ATTACKS.items()}
