"""Processes that tests start and watch, each of which may end while it is looked at."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

IGNORED_BY_JOBS = (signal.SIGINT, signal.SIGQUIT)
"""What a shell without job control makes a background job ignore, and with it all that the job starts."""


@contextmanager
def default_signals() -> Iterator[None]:
    """Processes that are started meanwhile have the default signals, although this one may have been told to ignore
    some. It goes on ignoring them: a handler that does nothing is not inherited by the programs that it starts."""
    ignored = [number for number in IGNORED_BY_JOBS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def background_job() -> Iterator[None]:
    """Processes that are started meanwhile ignore what a background job ignores."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED_BY_JOBS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def children_of(pid: int, word: str = "", *, recursive: bool = False) -> list[psutil.Process]:
    """The process's children that run and have the word in their command lines."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=recursive)
        return [child for child in children if runs(child) and word in command_of(child)]
    return []


def runs(process: psutil.Process) -> bool:
    """Whether the process runs. One that has ended does not, even if nobody has asked for its exit code yet."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def command_of(process: psutil.Process) -> str:
    """The process's command line; empty once it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""
