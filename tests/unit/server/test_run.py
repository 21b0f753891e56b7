"""The start of a server of one process: its engine loads beside it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from stridelm.config import EngineConfig
from stridelm.server import run
from stridelm.server.config import ServerConfig
from stridelm.server.run import Running
from support.doubles.server import until


def test_what_starts_the_engine_is_imported_at_once() -> None:
    lines = (
        "import sys",
        "import stridelm.server.run",
        "sys.exit(bool({'torch', 'transformers', 'fastapi', 'uvicorn'} & sys.modules.keys()))",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False).returncode == 0


def test_an_engine_that_refuses() -> None:
    command = (sys.executable, "-m", "stridelm.cli.main", "serve", "--port", "0", "--drafter", "medusa")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "medusa" in done.stderr and "Traceback" not in done.stderr, done
    assert "serving" not in done.stdout


def test_an_engine_that_dies_while_the_server_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is restarted, and serves when the server can, which knows all that was heard before."""
    load = run._load

    async def start() -> None:
        running = Running(ServerConfig(), EngineConfig(max_num_seqs=2, max_model_len=64, check_drafting=False))
        supervisor = running._supervisor

        def late(*asked: Any) -> Any:
            until("the engine is loaded", lambda: supervisor.why_down is None, 60)
            killed = supervisor.pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            until("another is", lambda: supervisor.why_down is None and supervisor.pid not in (None, killed), 60)
            until("it has reported", lambda: running._report is not None, 60)
            return load(*asked)

        monkeypatch.setattr(run, "_load", late)
        try:
            await running.start(lambda: None)
            service = running.server.service
            assert service.why_unhealthy is None and service.report is not None
            figures = service.metrics.render().decode()
            assert re.search(r"^stride_engine_up(\{.*\})? 1\.0$", figures, re.MULTILINE)
            assert re.search(r"^stride_engine_restarts_total(\{.*\})? 1\.0$", figures, re.MULTILINE)
        finally:
            await running.stop()

    asyncio.run(start())
    assert not [child for child in psutil.Process().children() if "stridelm.server.engine_process" in child.cmdline()]
