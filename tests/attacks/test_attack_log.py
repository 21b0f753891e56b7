"""Client input in the log, in errors and beside a dead engine: nothing can be mistaken for something else."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from attacks.raw import address_of, connect, rest
from stridelm.server.errors import LONGEST, bad_request
from stridelm.server.logs import JsonLines, Lines, OneAMinute
from support.doubles.server import PROMPT, Served, gauges, serving, settle, until

FORGED = "GET%20/%0AWARNING%20stridelm.server.run:%20forged%1b[2J%c2%9b%e2%80%a8%7f"


def log_of(served: Served) -> str:
    return served.log.read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=["--no-log-json", "--log-json"])
def logged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("logged"), request.param) as served:
        yield served
        assert served.stop() == 0


def test_a_line_cannot_be_forged(logged: Served) -> None:
    """A path with line ends and escape sequences stays one line, in which a terminal interprets nothing."""
    with connect(address_of(logged.url)) as connection:
        connection.sendall(
            f"GET /{FORGED}{'x' * 3000} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
        )
        rest(connection)
    until("it is logged", lambda: "forged" in log_of(logged), 5)
    [line] = [line for line in log_of(logged).split("\n") if "forged" in line]
    assert "404" in line and len(line) < 2000
    assert not any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 or letter == "\u2028" for letter in line)


@pytest.mark.parametrize(
    "body",
    [
        {"x" * 1_000_000: 1},
        {"prompt": "x", "model": "\x1b" * 1_000_000},
        {"prompt": "x", "temperature": "9" * 1_000_000},
        {"prompt": "x", "guided_regex": "(" + "x" * 100_000},
        {"prompt": "x", "speculation": {"drafter": "y" * 1_000_000}},
        {"prompt": "x", "service_tier": "y" * 1_000_000},
        {"prompt": "x", "structured_outputs": {"y" * 1_000_000: 1}},
    ],
    ids=lambda body: str(list(body)[-1])[:20],
)
def test_errors_are_short(logged: Served, body: dict[str, object]) -> None:
    """Whatever is wrong, the error does not echo the input."""
    with logged.http() as client:
        for route in ("/v1/completions", "/generate"):
            answer = client.post(route, json=body)
            assert answer.status_code in (400, 404), answer.text
            assert len(answer.content) < 3000 and len(answer.json()["error"]["message"]) <= LONGEST


def test_a_message_keeps_both_ends() -> None:
    error = bad_request("begin" + "x" * 10_000 + "end", "p" * 10_000)
    message = error.body["error"]["message"]
    assert len(message) <= LONGEST and message.startswith("begin") and message.endswith("end")
    assert len(error.body["error"]["param"]) <= LONGEST


def record(name: str, message: str) -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "", 0, message, (), None)


def test_a_flood_is_one_line() -> None:
    """A message that clients can trigger is logged once per minute, with the number of occurrences."""
    sieve = OneAMinute()
    passed = [
        sieve.filter(record("asyncio", f"socket.accept() out of system resource\nsocket: {i}")) for i in range(999)
    ]
    assert passed == [True] + [False] * 998
    assert sieve.filter(record("uvicorn.error", "another kind"))
    sieve._last = {kind: last - 61 for kind, last in sieve._last.items()}
    later = record("asyncio", "socket.accept() out of system resource\nsocket: 7")
    assert sieve.filter(later) and "998 times" in later.getMessage()
    assert all(sieve.filter(record("stridelm.server.supervisor", "it died")) for _ in range(3))


def test_a_traceback_cannot_be_forged() -> None:
    """An exception's text may contain client input; none of its lines can look like a line of the log."""
    try:
        raise ValueError("x\nERROR stridelm: forged\x1b[2J")
    except ValueError as error:
        logged = logging.LogRecord("a", logging.ERROR, "", 0, "m", (), (type(error), error, error.__traceback__))
    lines = Lines().format(logged).split("\n")
    assert all(line.startswith("    ") for line in lines[1:]) and "\x1b" not in "".join(lines)
    assert "\n" not in JsonLines().format(logged) and json.loads(JsonLines().format(logged))["exception"]


def test_metrics_beside_a_dead_engine(tmp_path: Path) -> None:
    """With the engine down, nothing is reported as running, waiting or held, and the server says that it is down."""
    with serving(tmp_path, "--max-restarts", "0") as served:
        assert "uvloop" in Path(f"/proc/{served.process.pid}/maps").read_text(encoding="utf-8")
        with served.openai() as client:
            body = {"model": "built-in", "prompt": PROMPT, "max_tokens": 450, "extra_body": {"ignore_eos": True}}
            stream = client.completions.create(**body, stream=True)  # if it were dropped, its request would be aborted
            next(iter(stream))
            until("it is counted", lambda: gauges(served)["stride_requests_running"] == 1, 10)
            assert gauges(served)["stride_engine_up"] == 1
            os.kill(served.engine.pid, signal.SIGKILL)
        until("it is seen", lambda: gauges(served)["stride_engine_up"] == 0, 10)
        figures = settle(served, 0.1)
        assert figures["stride_kv_usage_ratio"] == 0 and figures.get("stride_kv_pages", 0) == 0
        assert not any(value != value for value in figures.values())
        with served.http() as client:
            assert client.get("/get_load").json()[0]["num_reqs"] == 0
