"""How long a server's event loop blocks, measured from outside and from inside.

From outside: a process that requests /health repeatedly, and prints the longest response time, to which the machine
contributes too. `python -m support.checks.lag HOST PORT` until its standard input ends. From inside: watched_site.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 0.005
WATCHED_SITE = Path(__file__).parents[1] / "doubles" / "watched_site"
"""On a server's PYTHONPATH, makes its event loop report its longest turn."""


@dataclass
class Lag:
    """Filled in when the watch ends."""

    worst_s: float = 0.0
    asked: int = 0


@contextmanager
def watched(url: str) -> Iterator[Lag]:
    """Watch the server while the context is open."""
    host, port = url.removeprefix("http://").split(":")
    command = [sys.executable, __file__, host, port]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lag = Lag()
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield lag
    finally:
        said = process.communicate("", timeout=60)[0].split()
        lag.worst_s, lag.asked = float(said[0]), int(said[1])


def main() -> None:
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as connection:
        _ask(connection)
        print("ready", flush=True)
        worst, asked = 0.0, 0
        while not ended.is_set():
            began = time.monotonic()
            _ask(connection)
            worst, asked = max(worst, time.monotonic() - began), asked + 1
            time.sleep(EVERY_S)
    print(worst, asked, flush=True)


def _ask(connection: socket.socket) -> None:
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    received = b""
    while not received.endswith(b"}"):
        got = connection.recv(4096)
        assert got, "the server closed the connection"
        received += got


if __name__ == "__main__":
    main()
