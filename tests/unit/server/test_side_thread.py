"""Work beside the loop is waited for as long as anybody wants it, and keeps no server from ending."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import psutil
import pytest

from attacks.raw import address_of, connect, request
from stridelm.server.side_thread import on_side_thread
from support.doubles.server import Served, serving, until

LOOP = "{% for _ in range(99999) %}" * 4 + "{% endfor %}" * 4
ENDLESS = f"{{% if messages[0].content == 'x' %}}{LOOP}{{% endif %}}"
"""Only for some messages: one that never ends is found when the server starts."""


def test_results_and_errors() -> None:
    """What the work returns or raises reaches who waits."""

    def fail() -> None:
        raise ValueError("as it should")

    assert asyncio.run(on_side_thread(lambda: 5)) == 5
    with pytest.raises(ValueError, match="as it should"):
        asyncio.run(on_side_thread(fail))


def test_who_leaves_is_not_told() -> None:
    """Work may end after its caller has left, or after the loop has ended."""
    going_on = threading.Event()

    async def leave() -> None:
        waiting = asyncio.create_task(on_side_thread(going_on.wait))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    before = set(threading.enumerate())
    asyncio.run(leave())
    going_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_template_without_end(tmp_path: Path, processes: str) -> None:
    """SIGTERM ends the server, whatever is still rendered."""
    template = tmp_path / "endless.jinja"
    template.write_text(ENDLESS, encoding="utf-8")
    options = ("--chat-template", str(template), "--drain-timeout", "1", "--api-server-count", processes)
    with serving(tmp_path, *options, template=False) as served:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        with connect(address_of(served.url)) as connection:
            connection.sendall(request(address_of(served.url), body, "POST /v1/chat/completions"))
            until("it is being rendered", lambda: _busy(served), 30)
            assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def _busy(served: Served) -> bool:
    """Whether a process of the server, besides its engine, computes."""
    server = psutil.Process(served.process.pid)
    processes = [one for one in (server, *server.children(recursive=True)) if one != served.engine]
    before = sum(sum(one.cpu_times()[:2]) for one in processes)
    time.sleep(0.5)
    return sum(sum(one.cpu_times()[:2]) for one in processes) - before > 0.1
