"""Forks front-end processes: a process that has loaded the tokenizer, the routes and everything else that they need.

A front-end starts in some hundredths of a second instead of seconds, and shares with the others all memory that it does
not change. Nothing here runs a thread or an event loop: those begin in the fork.

`python -m stridelm.server.frontends.nursery FD`, started by fleet.py: what to load comes as JSON on standard input, and
each message on the socket FD carries a front-end's two sockets.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

import msgspec

from stridelm.config import EngineConfig
from stridelm.heap import freeze_heap
from stridelm.run.malloc import share_arenas
from stridelm.server.app import build_app
from stridelm.server.config import ServerConfig
from stridelm.server.frontends.frontend import run
from stridelm.server.frontends.messages import Loaded, Opening
from stridelm.server.lifeline import end_with
from stridelm.server.logs import ACCESS, set_up_logging
from stridelm.server.metrics import Metrics
from stridelm.server.service import Service

logger = logging.getLogger(__name__)


def main() -> None:
    end_with(os.getppid())
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole group of processes; the parent ends this one
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    opening = msgspec.json.decode(sys.stdin.buffer.read(), type=Opening)
    set_up_logging(opening.log_level, opening.server["log_json"])
    ACCESS.setLevel(opening.access_level)
    share_arenas()
    try:
        server, engine = ServerConfig(**opening.server), EngineConfig(**opening.engine)
        service = Service(server, engine, Metrics(server.names_of(engine.model)[0]))
    except ValueError as error:
        control.send(msgspec.json.encode(Loaded(str(error))))
        return
    app = build_app(service, bytes.fromhex(opening.salt))
    freeze_heap()  # collections do not touch what was loaded, so its pages stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that front-ends leave no zombies
    control.send(msgspec.json.encode(Loaded()))
    here = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:  # the parent is gone
            return
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        try:
            if os.fork() == 0:
                control.close()
                run(service, app, here, *sockets)
        except OSError:  # no process or memory at the moment: the parent sees its sockets close, and tries again
            logger.exception("a front-end process could not be forked")
        for one in sockets:
            one.close()


if __name__ == "__main__":
    main()
