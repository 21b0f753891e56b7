"""Imported by every Python process that finds this folder first on its path: records the longest turn of the server's
event loop.

A turn is what runs between two wake-ups of a task that sleeps for one millisecond at a time. It is measured as CPU time
of the process, over all its threads: time in which the machine ran something else is not counted. The file that
LOOP_WATCH names holds the longest turn since it was last removed, in seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

TARGET = "stridelm.server.alone"


class Watch(MetaPathFinder, Loader):
    """Loads the server normally, and then wraps its start."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        self.loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        server = module.Server
        startup = server.startup

        async def started(self: Any, sockets: Any = None) -> None:
            await startup(self, sockets=sockets)
            self.watch = asyncio.get_running_loop().create_task(_watch(Path(os.environ["LOOP_WATCH"])))

        server.startup = started


async def _watch(report: Path) -> None:
    longest = 0.0
    while True:
        began = time.process_time()
        await asyncio.sleep(0.001)
        turn = time.process_time() - began
        if not report.exists():
            longest = 0.0
        elif turn <= longest:
            continue
        longest = max(longest, turn)
        written = report.with_suffix(".new")  # who reads meanwhile must not find it empty
        written.write_text(str(longest), encoding="utf-8")
        written.replace(report)


sys.meta_path.insert(0, Watch())
