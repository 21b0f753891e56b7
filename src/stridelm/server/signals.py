"""Signals that arrive before a server can handle them itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stoppable() -> Iterator[None]:
    """In the main task, while a server loads: SIGTERM cancels the task, as SIGINT does in asyncio, so that whatever was
    started is ended. A second one changes nothing, since ending has begun."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    told = False

    def stop() -> None:
        nonlocal told
        if not told:
            told = True
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if not told:
            loop.remove_signal_handler(signal.SIGTERM)
