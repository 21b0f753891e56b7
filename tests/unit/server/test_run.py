"""The start of a server of one process: its engine loads beside it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys

import psutil

from stridelm.config import EngineConfig
from stridelm.server.alone import Server
from stridelm.server.config import ServerConfig
from stridelm.server.metrics import Metrics
from stridelm.server.run import loaded, supervised
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
    assert not [child for child in psutil.Process().children() if "stridelm.server.engine_process" in child.cmdline()]
