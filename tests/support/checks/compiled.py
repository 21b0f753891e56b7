"""Runs the checks that compile kernels for a card that is not there, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.checks.before_waiting import check_waits


def compiled(check: str, cache: Path, *options: str) -> list[dict[str, Any]]:
    """What support.checks.CHECK says of the kernels that it compiled. Those that it looks at wait as they must. cache:
    where Triton keeps them. options: the check's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", f"support.checks.{check}", *options],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    kernels: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    check_waits([kernel for kernel in kernels if "before" in kernel])
    return kernels
