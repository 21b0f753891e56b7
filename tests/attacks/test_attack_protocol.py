"""Requests that are not quite HTTP: refused or closed, in time, and never parsed as two different requests."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from attacks.protocol_cases import CASES, data_of
from attacks.raw import Address, address_of, connect, rest, send
from support.doubles.server import PROMPT, Served, offline, serving, settle

OPTIONS = ("--timeout-head", "2", "--timeout-body-idle", "2", "--timeout-keep-alive", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server to which an honest client sends requests throughout the attacks."""
    expected = offline([PROMPT], temperature=0, max_tokens=16)[0].text
    said: list[str] = []
    over = threading.Event()
    with serving(tmp_path_factory.mktemp("protocol"), *OPTIONS) as served:

        def stay() -> None:
            with served.openai() as client:
                while not over.is_set():
                    answer = client.completions.create(model="built-in", prompt=PROMPT, temperature=0, max_tokens=16)
                    said.append(answer.choices[0].text)
                    time.sleep(0.05)

        staying = threading.Thread(target=stay)
        staying.start()
        yield served
        over.set()
        staying.join()
        settle(served)
        assert set(said) == {expected}
        assert served.stop() == 0
        assert "Traceback" not in served.log.read_text(encoding="utf-8")


SEVERAL = ("two at once", "a hundred at once")
"""Cases that are several requests under any reading."""


def statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"(?:^|\r\n\r\n|[}\n])HTTP/1\.1 (\d{3})", answer)]


def play(address: Address, name: str) -> bytes | None:
    """The bytes received until the connection is closed; None if it is not."""
    with connect(address) as connection:
        send(connection, data_of(CASES[name], address))
        if "closed within" in name:
            connection.shutdown(socket.SHUT_WR)
        return rest(connection, 9)


@pytest.fixture(scope="module")
def answers(server: Served) -> dict[str, bytes | None]:
    """Responses to all cases, sixteen at a time."""
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(CASES, pool.map(partial(play, address_of(server.url)), CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_not_quite_http(answers: dict[str, bytes | None], name: str) -> None:
    """4xx or closed; never 500, never longer than the timeout, and no smuggled request is answered."""
    answer = answers[name]
    assert answer is not None, "the connection stays open"
    found = statuses(answer)
    assert not any(status >= 500 for status in found), answer
    if name in SEVERAL:
        return
    assert len(found) <= 1 or found[1] >= 400, answer
    assert b'"object":"list"' not in answer, answer
