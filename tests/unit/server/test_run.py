"""The start of a server of one process: its engine loads beside it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stridelm.config import EngineConfig
from stridelm.server.alone import Server
from stridelm.server.config import ServerConfig
from stridelm.server.metrics import Metrics
from stridelm.server.run import loaded, supervised
from support.doubles.processes import background_job, children_of, runs
from support.doubles.server import engines_of, serving, until

SERVE = (sys.executable, "-m", "stridelm.cli.main", "serve")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory in which sockets can have addresses."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def test_what_starts_the_engine_is_imported_at_once() -> None:
    lines = (
        "import sys",
        "import stridelm.server.run",
        "sys.exit(bool({'torch', 'transformers', 'fastapi', 'uvicorn'} & sys.modules.keys()))",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False).returncode == 0


def test_an_engine_that_refuses(short_path: Path) -> None:
    done = _ended(short_path, "--port", "0", "--drafter", "medusa")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert "'medusa' cannot run on this model" in done.stderr, done
    assert "serving" not in done.stdout
    assert not list(short_path.glob("stride-*"))


def test_a_port_that_is_taken(short_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = _ended(short_path, "--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))
    assert done.returncode != 0 and "Traceback" not in done.stderr, done
    assert not list(short_path.glob("stride-*"))


def test_a_directory_that_is_too_long(tmp_path: Path) -> None:
    longest = tmp_path / ("x" * 70)
    longest.mkdir()
    done = _ended(longest, "--port", "0")
    assert done.returncode == 2 and "TMPDIR" in done.stderr and "Traceback" not in done.stderr, done


@pytest.mark.parametrize("frontends", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_loads(number: signal.Signals, code: int, frontends: int, short_path: Path) -> None:
    """It ends with the processes it has started, and leaves no files, although it was told to ignore SIGINT."""
    command = (*SERVE, "--port", "0", "--api-server-count", str(frontends))
    with background_job():
        process = subprocess.Popen(
            command, env=_temporary(short_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    with process:
        try:
            until("the engine is started", lambda: bool(engines_of(process.pid)), 60)
            started = children_of(process.pid, recursive=True)
            process.send_signal(number)
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()  # does nothing once its exit code is known
    assert process.returncode == code, (said, errors)
    assert "Traceback" not in errors and "serving" not in said
    until("all that it started ends", lambda: not any(map(runs, started)), 10)
    assert not list(short_path.glob("stride-*"))


@pytest.mark.parametrize("frontends", [1, 2])
def test_a_signal_while_it_serves(frontends: int, tmp_path: Path) -> None:
    """It ends with the processes it has started, although it was told to ignore SIGINT."""
    with background_job(), serving(tmp_path, "--api-server-count", str(frontends)) as served:
        started = children_of(served.process.pid, recursive=True)
        assert len(started) == (1 if frontends == 1 else 2 + frontends)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(60) == 0, served.log.read_text(encoding="utf-8")
    until("all that it started ends", lambda: not any(map(runs, started)), 10)


def _ended(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A server that ends by itself, whose temporary files are in the directory."""
    command = (*SERVE, *options)
    return subprocess.run(command, env=_temporary(directory), capture_output=True, text=True, timeout=120, check=False)


def _temporary(directory: Path) -> dict[str, str]:
    """This process's environment, with another directory for temporary files."""
    return {**os.environ, "TMPDIR": str(directory)}


def test_an_engine_that_dies_while_the_server_is_imported() -> None:
    """It is restarted, and serves when the server can, which knows all that was heard before."""
    config, metrics = ServerConfig(), Metrics("built-in")
    engine = EngineConfig(max_num_seqs=2, max_model_len=64, check_drafting=False)
    supervisor = supervised(config, engine, metrics)

    def late() -> Server:
        until("the engine is loaded", lambda: supervisor.why_down is None, 60)
        killed = supervisor.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        until("another is", lambda: supervisor.why_down is None and supervisor.pid not in (None, killed), 60)
        until("it has reported", lambda: supervisor.report is not None, 60)
        return Server(config, engine, metrics, lambda: None)

    async def start() -> None:
        try:
            service = (await loaded(supervisor, late)).service
            assert service.why_unhealthy is None and service.report is not None
            figures = service.metrics.render().decode()
            assert re.search(r"^stride_engine_up(\{.*\})? 1\.0$", figures, re.MULTILINE)
            assert re.search(r"^stride_engine_restarts_total(\{.*\})? 1\.0$", figures, re.MULTILINE)
        finally:
            await supervisor.stop()

    asyncio.run(start())
    assert not engines_of(os.getpid())
