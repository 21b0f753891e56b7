"""Where workers are born: a process that has loaded all that a kind of work needs, and forks for each piece of it.

A fork takes milliseconds where a new process takes seconds, so that one may be used once: nothing of a piece of work
stays behind, neither its memory nor its text, and one that takes too long, or whose client has left, is killed.

`python -m stridelm.server.workers.nursery KIND FD`, started by pool.py: what the kind of work is to load comes as JSON
on standard input, and each message at the socket FD bears one end of a worker's own.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from importlib import import_module

from stridelm.server.lifeline import end_with

KINDS = {"bodies": "stridelm.server.workers.bodies", "grammars": "stridelm.server.workers.grammars"}
"""Kind of work -> the module whose `prepare` takes what was on standard input and gives what does a piece of it."""
HEAD = struct.Struct("<Qd")
"""Before a piece of work: its bytes, and the seconds that it may take. Before what came of it: its bytes, and zero."""
PID = struct.Struct("<i")
MEMORY = 1 << 30
"""Bytes that a worker may take beyond those that it was born with."""
NICENESS = 5
"""Whoever waits for the loop or for a step goes first."""

Work = Callable[[bytes], bytes]


def main() -> None:
    end_with(os.getppid())
    kind, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    prepare: Callable[[bytes], Work] = import_module(KINDS[kind]).prepare
    work = prepare(sys.stdin.buffer.read())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that none stays as a zombie
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # what was loaded stays shared
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not message:  # the server is gone
            return
        if os.fork() == 0:
            control.close()
            _live(work, socket.socket(fileno=sockets[0]))
        os.close(sockets[0])


def _live(work: Work, line: socket.socket) -> None:
    """Do one piece of work, and end."""
    try:
        line.sendall(PID.pack(os.getpid()))
        size, seconds = HEAD.unpack(_receive(line, HEAD.size))
        # Ended by the kernel, wherever it is, even if nobody is left to kill it.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        _limit_memory()
        os.nice(NICENESS)
        result = work(_receive(line, size))
        line.sendall(HEAD.pack(len(result), 0.0) + result)
    except (MemoryError, OSError):  # it took too much, or the client left: nobody asks why
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
            raise ConnectionError("the server left")
        got += count
    return bytes(received)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        born = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (born + MEMORY, born + MEMORY))


if __name__ == "__main__":
    main()
