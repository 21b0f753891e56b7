"""Starts a nursery: a process that loads everything once, and from then on forks what is asked of it over a socket."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import Process


async def start_nursery(
    module: str, *words: str, opening: bytes, kind: socket.SocketKind = socket.SOCK_STREAM
) -> tuple[Process, socket.socket]:
    """The process and this end of its socket, which does not block. The module's arguments are the words and the number
    of the other end; the opening comes on its standard input. Raises OSError if the process cannot be started."""
    ours, theirs = socket.socketpair(type=kind)
    ours.setblocking(False)
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *words, str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                # One thread: a fork takes only that one along.
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    assert process.stdin is not None
    process.stdin.write(opening)
    process.stdin.close()
    return process, ours
