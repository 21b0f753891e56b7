"""Real routers from PyPI in front of real servers, each in a process of its own."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from support.doubles.server import Served, until

MODULES = {"smg": ("smg", "launch"), "vllm-router": ("vllm_router.launch_router",)}
"""A router's name on PyPI -> its module, and the first arguments."""
READY = {"smg": "/readiness", "vllm-router": "/health"}


@dataclass(frozen=True)
class Router:
    """A running router."""

    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any], name: str) -> Any:
        """The answer's JSON, which must be a success. name: of the request."""
        with httpx.Client(base_url=self.url, timeout=30) as client:
            answer = client.post(path, json=body, headers={"x-request-id": name})
        assert answer.status_code == 200, (answer.text, self.log.read_text(encoding="utf-8")[-2000:])
        assert answer.headers["x-request-id"] == name
        return answer.json()

    def get(self, path: str) -> Any:
        with httpx.Client(base_url=self.url, timeout=30) as client:
            return client.get(path).raise_for_status().json()


@contextmanager
def routing(kind: str, log: Path, workers: Sequence[Served], *options: str) -> Iterator[Router]:
    """A router over these workers, once it serves. kind: as on PyPI."""
    port, metrics = free_ports(2)
    module, *first = MODULES[kind]
    command = [sys.executable, "-m", module, *first, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--worker-urls", *(worker.url for worker in workers), *options]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "NO_COLOR": "1"})
        try:
            router = Router(f"http://127.0.0.1:{port}", log)
            until(f"{kind} serves", lambda: _serves(f"{router.url}{READY[kind]}"), 30)
            yield router
        finally:
            process.kill()
            process.wait()


def _serves(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that no connection is given: until a server listens on one, seconds pass."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("", port)):
            found.append(port)
    return found


def served_by(workers: Sequence[Served], name: str) -> int:
    """The number of the worker whose log has the request of this name, as completed."""
    pattern = re.compile(rf"POST /v1/\S*completions 200 .*request_id={re.escape(name)} ")
    found: list[int] = []

    def known() -> bool:
        found[:] = [i for i, one in enumerate(workers) if pattern.search(one.log.read_text(encoding="utf-8"))]
        return bool(found)

    until(f"a worker has logged {name}", known, 10)
    [number] = found
    return number
