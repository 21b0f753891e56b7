"""A bad moment of the machine: what keeps the engine alive outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from stridelm.config import EngineConfig
from stridelm.server import supervisor as module
from stridelm.server.supervisor import Supervisor
from support.doubles.server import PROMPT, Served, offline, serving, settle, until


@pytest.fixture
def frail(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as served:
        yield served


def log_of(served: Served) -> str:
    return served.log.read_text(encoding="utf-8")


def test_no_descriptor_is_left(frail: Served) -> None:
    """The engine dies while the server can open nothing; when it can again, the engine is started, whatever the number
    of attempts, and says what it said before."""
    server = psutil.Process(frail.process.pid)
    [engine] = server.children()
    before = server.rlimit(psutil.RLIMIT_NOFILE)
    taken = max(int(name) for name in os.listdir(f"/proc/{server.pid}/fd")) + 1
    server.rlimit(psutil.RLIMIT_NOFILE, (min(taken, 16), before[1]))
    os.kill(engine.pid, signal.SIGKILL)
    until("its start fails twice", lambda: log_of(frail).count("Too many open files") >= 2, 20)
    server.rlimit(psutil.RLIMIT_NOFILE, before)
    with frail.http() as client:
        assert client.get("/health").status_code in (200, 503)
        until("the engine comes back", lambda: client.get("/health").status_code == 200)
    [expected] = offline([PROMPT], temperature=0, max_tokens=20)
    with frail.openai() as other:
        answer = other.completions.create(model="built-in", prompt=PROMPT, temperature=0, max_tokens=20)
    assert answer.choices[0].text == expected.text
    settle(frail)
    assert frail.stop() == 0, log_of(frail)


def test_a_hung_engine(tmp_path: Path) -> None:
    """It stops in the middle of a stream: who waits is told, and another engine says what it would have said. One that
    only takes long, or has nothing to do, is left alone."""
    with serving(tmp_path, "--engine-timeout", "4") as served, served.openai() as client:
        [engine] = psutil.Process(served.process.pid).children()
        time.sleep(6)  # idle
        engine.suspend()
        time.sleep(2)
        engine.resume()
        time.sleep(4)
        assert engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE
        body = {"model": "built-in", "prompt": PROMPT, "temperature": 0, "max_tokens": 400}
        stream = client.completions.create(**body, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        engine.suspend()
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)
        with served.http() as http:
            until("another is there", lambda: http.get("/health").status_code == 200)
        [expected] = offline([PROMPT], temperature=0, max_tokens=20)
        assert client.completions.create(**{**body, "max_tokens": 20}).choices[0].text == expected.text
        assert served.stop() == 0


def test_nobody_outlives_the_server(tmp_path: Path) -> None:
    """Killed while the engine hangs and a grammar is being compiled, it leaves no process behind."""
    grammar = {"prompt": "x", "max_tokens": 4, "guided_regex": "(a|b)*c"}
    with serving(tmp_path) as served:
        with served.http() as client:
            assert client.post("/v1/completions", json=grammar).status_code == 200
        others = psutil.Process(served.process.pid).children()
        assert len(others) == 2
        for other in others:
            other.suspend()
        served.process.kill()
        gone = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        until("they end", lambda: not any(one.is_running() and one.status() not in gone for one in others), 15)


class Process:
    """An engine's process that does nothing."""

    pid, returncode = 1, None

    def __init__(self) -> None:
        self.died = asyncio.Event()

    async def wait(self) -> int:
        await self.died.wait()
        self.returncode = -9
        return -9

    def kill(self) -> None:
        self.died.set()


def lone(monkeypatch: pytest.MonkeyPatch, starts: list[Exception | None]) -> tuple[Supervisor, list[float]]:
    """A supervisor whose starts come out as listed, and the times of them."""
    kept = Supervisor(EngineConfig(), 3, 60.0, lambda *_: None, lambda _: None, lambda: None, lambda: None)
    began: list[float] = []

    async def load() -> Any:
        began.append(time.monotonic())
        outcome = starts.pop(0) if starts else None
        if outcome is not None:
            raise outcome
        kept._process, kept.why_down = Process(), None  # type: ignore[assignment]

    monkeypatch.setattr(kept, "_load", load)
    monkeypatch.setattr(module, "BACKOFF_S", 0.02)
    return kept, began


async def came_back(kept: Supervisor) -> None:
    while kept.why_unhealthy is not None:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), MemoryError(), BlockingIOError(11, "x"), KeyError()], ids=repr
)
def test_any_exception(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """More often than an engine may die, later each time: these are no deaths."""

    async def go() -> None:
        kept, began = lone(monkeypatch, [None, *[error] * 5])
        await kept.start()
        kept._process.kill()  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
        assert kept.why_unhealthy is not None
        await asyncio.wait_for(came_back(kept), 10)
        pauses = [after - before for before, after in pairwise(began[1:])]
        assert len(began) == 7 and pauses == sorted(pauses)
        await kept.stop()

    asyncio.run(go())


def test_the_watchman_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that keeps the engine ends: health says so, it is started again, and the next death is seen."""

    async def go() -> None:
        kept, began = lone(monkeypatch, [])
        await kept.start()
        for _ in range(3):
            kept._keeping.cancel()  # type: ignore[union-attr]
            await asyncio.sleep(0.005)
            assert "watches" in str(kept.why_unhealthy)
            await asyncio.wait_for(came_back(kept), 5)
        kept._process.kill()  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(came_back(kept), 5)
        assert len(began) == 2
        await kept.stop()

    asyncio.run(go())
