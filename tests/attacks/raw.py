"""Raw sockets for attacks: bytes that no HTTP library would send."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Address = tuple[str, int]


def address_of(url: str) -> Address:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def credentials() -> dict[str, str]:
    """The header with one of the attackers' keys, if ATTACK_KEYS lists any."""
    keys = os.environ.get("ATTACK_KEYS", "").split()
    return {"authorization": f"Bearer {random.choice(keys)}"} if keys else {}


def head(address: Address, length: int | None = None, route: str = "POST /v1/completions", *more: str) -> bytes:
    """A request's head, with the length of its body if it has one, and an attacker's key unless `more` has a key."""
    lines = [f"{route} HTTP/1.1", f"host: {address[0]}:{address[1]}", "content-type: application/json", *more]
    if not any(line.startswith("authorization:") for line in more):
        lines += [f"{name}: {value}" for name, value in credentials().items()]
    lines += [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def request(address: Address, body: dict[str, Any], route: str = "POST /v1/completions") -> bytes:
    content = json.dumps(body).encode()
    return head(address, len(content), route) + content


def connect(address: Address, timeout: float = 10.0, window: int | None = None) -> socket.socket:
    """window: how many unread bytes the client's side of the connection buffers."""
    connection = socket.socket()
    if window is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    connection.settimeout(timeout)
    connection.connect(address)
    return connection


@contextmanager
def connected(address: Address, count: int, timeout: float = 10.0) -> Iterator[list[socket.socket]]:
    connections: list[socket.socket] = []
    try:
        connections += (connect(address, timeout) for _ in range(count))
        yield connections
    finally:
        for connection in connections:
            connection.close()


def rest(connection: socket.socket, seconds: float = 10.0) -> bytes | None:
    """The bytes received until the server closes; None if it does not in time."""
    received, end = bytearray(), time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            piece = connection.recv(1 << 16)
        except TimeoutError:
            return None
        except OSError:  # reset
            return bytes(received)
        if not piece:
            return bytes(received)
        received += piece
    return None


def send(connection: socket.socket, data: bytes) -> bool:
    """Whether all of it was accepted before the server closed."""
    try:
        connection.sendall(data)
    except OSError:
        return False
    return True


def status(answer: bytes | None) -> int:
    """The status of a response; 0 if the connection was closed without one, -1 if neither happened."""
    if answer is None:
        return -1
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
