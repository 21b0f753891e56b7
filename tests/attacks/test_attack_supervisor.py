"""Transient failures of the machine: the task that keeps the engine alive survives them."""

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
from support.doubles.processes import children_of, runs
from support.doubles.server import PROMPT, Served, offline, serving, settle, until


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as served:
        yield served


def log_of(served: Served) -> str:
    return served.log.read_text(encoding="utf-8")


def test_no_descriptor_for_the_engine(served: Served) -> None:
    """The engine dies while the server cannot open any file; once it can again, the engine is restarted, regardless of
    the number of attempts, and its output is the same as before."""
    server = psutil.Process(served.process.pid)
    before = server.rlimit(psutil.RLIMIT_NOFILE)
    taken = max(int(name) for name in os.listdir(f"/proc/{server.pid}/fd")) + 1
    server.rlimit(psutil.RLIMIT_NOFILE, (min(taken, 16), before[1]))
    os.kill(served.engine.pid, signal.SIGKILL)
    until("its start fails twice", lambda: log_of(served).count("Too many open files") >= 2, 20)
    server.rlimit(psutil.RLIMIT_NOFILE, before)
    with served.http() as client:
        assert client.get("/health").status_code in (200, 503)
        until("the engine comes back", lambda: client.get("/health").status_code == 200)
    [expected] = offline([PROMPT], temperature=0, max_tokens=20)
    with served.openai() as other:
        answer = other.completions.create(model="built-in", prompt=PROMPT, temperature=0, max_tokens=20)
    assert answer.choices[0].text == expected.text
    settle(served)
    assert served.stop() == 0, log_of(served)


def test_a_hung_engine(tmp_path: Path) -> None:
    """It stops in the middle of a stream: the client gets an error, and a new engine gives the expected output. An
    engine that is only slow, or idle, is left alone."""
    with serving(tmp_path, "--engine-timeout", "4") as served, served.openai() as client:
        engine = served.engine
        time.sleep(6)  # idle
        engine.suspend()
        time.sleep(2)
        engine.resume()
        time.sleep(4)
        assert runs(engine)
        body = {"model": "built-in", "prompt": PROMPT, "temperature": 0, "max_tokens": 400}
        stream = client.completions.create(**body, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        engine.suspend()
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)
        with served.http() as http:
            until("the new engine is up", lambda: http.get("/health").status_code == 200)
        [expected] = offline([PROMPT], temperature=0, max_tokens=20)
        assert client.completions.create(**{**body, "max_tokens": 20}).choices[0].text == expected.text
        assert served.stop() == 0


def test_no_process_outlives_the_server(tmp_path: Path) -> None:
    """If the server is killed while the engine hangs and a grammar is being compiled, no process is left behind."""
    grammar = {"prompt": "x", "max_tokens": 4, "guided_regex": "(a|b)*c"}
    with serving(tmp_path) as served:
        with served.http() as client:
            assert client.post("/v1/completions", json=grammar).status_code == 200
        others = children_of(served.process.pid)
        assert len(others) == 2
        for other in others:
            other.suspend()
        served.process.kill()
        until("they end", lambda: not any(map(runs, others)), 15)


class Process:
    """An engine process that does nothing."""

    pid, returncode = 1, None

    def __init__(self) -> None:
        self.died = asyncio.Event()

    async def wait(self) -> int:
        await self.died.wait()
        self.returncode = -9
        return -9

    def kill(self) -> None:
        self.died.set()


def supervisor_of(monkeypatch: pytest.MonkeyPatch, starts: list[Exception | None]) -> tuple[Supervisor, list[float]]:
    """A supervisor whose starts have the listed outcomes, and the times of the starts."""
    supervisor = Supervisor(EngineConfig(), 3, 60.0, lambda *_: None, lambda _: None, lambda: None, lambda: None)
    began: list[float] = []

    async def load() -> Any:
        began.append(time.monotonic())
        outcome = starts.pop(0) if starts else None
        if outcome is not None:
            raise outcome
        supervisor._process, supervisor.why_down = Process(), None  # type: ignore[assignment]

    monkeypatch.setattr(supervisor, "_load", load)
    monkeypatch.setattr(module, "BACKOFF_S", 0.02)
    return supervisor, began


async def came_back(supervisor: Supervisor) -> None:
    while supervisor.why_unhealthy is not None:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), MemoryError(), BlockingIOError(11, "x"), KeyError()], ids=repr
)
def test_any_exception(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Failed starts do not count as engine deaths: they are retried beyond that limit, at growing intervals."""

    async def go() -> None:
        supervisor, began = supervisor_of(monkeypatch, [None, *[error] * 5])
        await supervisor.start()
        supervisor._process.kill()  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
        assert supervisor.why_unhealthy is not None
        await asyncio.wait_for(came_back(supervisor), 10)
        pauses = [after - before for before, after in pairwise(began[1:])]
        assert len(began) == 7 and pauses == sorted(pauses)
        await supervisor.stop()

    asyncio.run(go())


def test_the_watching_task_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that keeps the engine ends: health reports it, the task is restarted, and notices the next death."""

    async def go() -> None:
        supervisor, began = supervisor_of(monkeypatch, [])
        await supervisor.start()
        for _ in range(3):
            supervisor._keeping.cancel()  # type: ignore[union-attr]
            await asyncio.sleep(0.005)
            assert "watches" in str(supervisor.why_unhealthy)
            await asyncio.wait_for(came_back(supervisor), 5)
        supervisor._process.kill()  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(came_back(supervisor), 5)
        assert len(began) == 2
        await supervisor.stop()

    asyncio.run(go())
