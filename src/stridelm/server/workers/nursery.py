"""Forks workers: a process that has loaded everything that a kind of work needs, and forks once per task.

A fork takes milliseconds where a new process takes seconds, so a worker can be used only once: nothing of a task stays
behind, neither its memory nor its text, and a worker that takes too long, or whose client has left, is killed.

`python -m stridelm.server.workers.nursery KIND FD`, started by pool.py: what to load comes as JSON on standard input,
and each message on the socket FD carries one end of a new worker's own socket.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from importlib import import_module

from stridelm.heap import freeze_heap
from stridelm.server.lifeline import end_with

KINDS = {"bodies": "stridelm.server.workers.bodies", "grammars": "stridelm.server.workers.grammars"}
"""Kind of work -> the module whose `prepare` takes the bytes from standard input and returns the function that does a
task."""
HEAD = struct.Struct("<Qd")
"""Before a task: its size in bytes, and the seconds that it may take. Before a result: its size in bytes, and zero."""
PID = struct.Struct("<i")
MEMORY = 1 << 30
"""Bytes that a worker may allocate beyond those that it starts with."""
NICENESS = 5
"""The event loop and the engine go first."""

Work = Callable[[bytes], bytes]


def main() -> None:
    end_with(os.getppid())
    kind, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    prepare: Callable[[bytes], Work] = import_module(KINDS[kind]).prepare
    work = prepare(sys.stdin.buffer.read())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that workers leave no zombies
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    freeze_heap()  # collections do not touch what was loaded, so its pages stay shared with workers
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not message:  # the server is gone
            return
        if os.fork() == 0:
            control.close()
            _run_worker(work, socket.socket(fileno=sockets[0]))
        os.close(sockets[0])


def _run_worker(work: Work, line: socket.socket) -> None:
    """Do one task, and exit."""
    try:
        line.sendall(PID.pack(os.getpid()))
        size, seconds = HEAD.unpack(_receive(line, HEAD.size))
        # The kernel ends the worker when its time is up, even if nobody is left to kill it.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        _limit_memory()
        os.nice(NICENESS)
        result = work(_receive(line, size))
        line.sendall(HEAD.pack(len(result), 0.0) + result)
    except (MemoryError, OSError):  # too much memory, or the client left: neither needs a traceback
        os._exit(1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _receive(line: socket.socket, size: int) -> bytes:
    received = bytearray(size)
    view, got = memoryview(received), 0
    while got < size:
        count = line.recv_into(view[got:])
        if not count:
            raise ConnectionError("the server closed the connection")
        got += count
    return bytes(received)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        at_start = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (at_start + MEMORY, at_start + MEMORY))


if __name__ == "__main__":
    main()
