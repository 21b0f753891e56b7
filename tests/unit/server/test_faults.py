"""Faults of clients and machines: the server responds, nothing leaks, and the next request is served."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from stridelm import SamplingParams
from support.doubles.processes import runs
from support.doubles.server import PROMPT, Served, gauges, llm, offline, serving, settle, until

LONG = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def request_head(length: int) -> bytes:
    lines = (
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {length}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def test_clients_that_leave(served: Served) -> None:
    """At random points, streaming or not: their pages are free within a step or two, and others are unaffected."""
    draw = random.Random(5)
    [expected] = offline([PROMPT], temperature=0, max_tokens=60, ignore_eos=True)
    said: list[str] = []

    def stay() -> None:
        with served.openai() as client:
            for _ in range(12):
                answer = client.completions.create(
                    model="built-in", prompt=PROMPT, temperature=0, max_tokens=60, extra_body={"ignore_eos": True}
                )
                said.append(answer.choices[0].text)

    staying = threading.Thread(target=stay)
    staying.start()
    address = served.url.removeprefix("http://").split(":")
    for i in range(320):
        body = json.dumps({**LONG, "stream": i % 2 == 0, "n": draw.randint(1, 3)}).encode()
        message = request_head(len(body)) + body
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(message[: draw.randint(1, len(message))] if draw.random() < 0.2 else message)
            if draw.random() < 0.7:
                connection.settimeout(draw.random() * 0.04)
                try:
                    while connection.recv(4096) and draw.random() < 0.8:
                        pass
                except TimeoutError:
                    pass
    staying.join()
    assert said == [expected.text] * 12
    figures = settle(served)
    assert figures["stride_engine_aborted_requests_total"] > 100


def test_gone_within_a_step(served: Served) -> None:
    """The stream is closed, and its resources are released without its next token being sent."""
    with served.http() as client, client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        next(answer.iter_lines())
    began = time.monotonic()
    settle(served, 2.0)
    assert gauges(served)["stride_requests_running"] == 0 and time.monotonic() - began < 2.0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": 3}',
        b'{"prompt": ["a", 3]}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": "x", "max_tokens": "5"}',
        b'{"prompt": "x", "max_tokens": 1e400}',
        b'{"prompt": "x", "max_tokens": 99999999999999999999999}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "seed": 1.5}',
        b'{"prompt": "x", "n": 100000}',
        b'{"prompt": "x", "stream": "yes"}',
        b'{"prompt": "x", "logit_bias": {"999999999": 1}}',
        b'{"prompt": "x", "logit_bias": {"1": "much"}}',
        b'{"prompt": "x", "unheard_of": 1}',
        b'{"prompt": [18446744073709551616]}',
        b'{"prompt": "x", "stop": "\\ud800"}',
        b'{"prompt": "x", "speculation": {"\\ud800": 1}}',
        b'{"prompt": "' + b"(" * 100_000 + b'"}',
        b"[" * 100_000,
        json.dumps({"prompt": "x", "stop": [f"stop {i}" for i in range(10_000)]}).encode(),
        json.dumps({"prompt": "x", "bad_words": ["word"] * 5_000}).encode(),
        json.dumps({"prompt": ["x"] * 5_000}).encode(),
    ],
    ids=lambda body: body[:40].decode(errors="replace"),
)
def test_bodies_that_will_not_do(served: Served, body: bytes) -> None:
    """A client's mistake is reported as a client error, in OpenAI's format."""
    with served.http(headers={"content-type": "application/json"}) as client:
        for route in ("/v1/completions", "/v1/chat/completions"):
            answer = client.post(route, content=body)
            assert answer.status_code == 400, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert len(answer.content) < 2000


@pytest.mark.parametrize(("over", "status"), [(0, 200), (1, 400)])
def test_prompts_at_the_limit(served: Served, over: int, status: int) -> None:
    """A context has room for 512 tokens, one of them output."""
    with served.http() as client:
        answer = client.post("/v1/completions", json={"prompt": [300] * (511 + over), "max_tokens": 1})
    assert answer.status_code == status, answer.text


def test_a_slow_reader_stalls_nobody(served: Served) -> None:
    """It reads none of several megabytes while others are served and its own samples end, then gets them all."""
    settings = {**LONG, "max_tokens": 450, "n": 3, "logprobs": 20, "temperature": 1, "seed": 3, "stream": True}
    asked: dict[str, Any] = {"n": 3, "seed": 3, "max_tokens": 450, "ignore_eos": True}
    expected, plain = (
        [sample.text for sample in llm().generate(PROMPT, SamplingParams(**asked, speculation=how))[0].outputs]
        for how in (None, "off")
    )
    assert expected == plain
    body = json.dumps(settings).encode()
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with connection:
        connection.connect((host, int(port)))
        connection.sendall(request_head(len(body)) + body)
        with served.openai() as other:
            for _ in range(3):
                assert other.completions.create(model="built-in", prompt=PROMPT, max_tokens=20).choices
        settle(served, 60)
        received = bytearray()
        connection.settimeout(20)
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 20)
    assert len(received) > 512 << 10  # more than the small window and buffers hold
    texts = [""] * 3
    for line in received.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == expected


@pytest.fixture
def frail(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, "--max-restarts", "1", "--drain-timeout", "2") as served:
        yield served


def errors(served: Served) -> float:
    """Samples that ended with the reason `error`."""
    with served.http() as client:
        lines = client.get("/metrics").text.splitlines()
    name = "stride_requests_finished_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and 'finished_reason="error"' in line)


def test_one_request_fails(tmp_path: Path) -> None:
    """A request that makes the engine raise, or whose text cannot be made, gets 500, or its stream ends with an error
    event; requests beside it get every token, and the engine's process stays the same one. Repeated several times."""
    [expected] = offline([PROMPT], temperature=0, max_tokens=300, ignore_eos=True)
    said: list[str] = []
    site = Path(__file__).parents[2] / "support" / "doubles" / "planted_site"
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    with (
        serving(tmp_path, environment={"PYTHONPATH": path}) as served,
        served.openai() as client,
        served.http() as http,
    ):
        engine = served.engine.pid

        def stay() -> None:
            with served.openai() as other:
                stream = other.completions.create(
                    model="built-in",
                    prompt=PROMPT,
                    temperature=0,
                    max_tokens=300,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                said.append("".join(event.choices[0].text for event in stream))

        staying = [threading.Thread(target=stay) for _ in range(2)]
        for thread in staying:
            thread.start()
        for seed in (666, 667, 668) * 3:
            body = {"prompt": "def f(", "max_tokens": 40, "seed": seed, "ignore_eos": True, "n": 2}
            with pytest.raises(openai.InternalServerError, match="LookupError inside the engine") as caught:
                client.completions.create(
                    model="built-in", prompt="def f(", max_tokens=40, seed=seed, extra_body={"ignore_eos": True}
                )
            assert caught.value.status_code == 500 and caught.value.code == "request_failed"
            lines = http.post("/v1/completions", json={**body, "stream": True}).text.strip().split("\n\n")
            assert lines[-1] == "data: [DONE]"
            assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "request_failed"
            native = {"max_new_tokens": 40, "sampling_seed": seed, "ignore_eos": True}
            assert http.post("/generate", json={"text": "def f(", "sampling_params": native}).status_code == 500
        for thread in staying:
            thread.join()
        assert said == [expected.text] * 2
        figures = settle(served)
        assert figures["stride_engine_failed_requests_total"] >= 18 and "stride_engine_restarts_total" in figures
        assert figures["stride_engine_restarts_total"] == 0 and served.engine.pid == engine
        assert errors(served) >= 27
        assert served.stop() == 0


def test_the_engine_is_killed(frail: Served) -> None:
    """Waiting clients are told at once, the HTTP side survives, the engine restarts; killed again, it stays down."""

    def health() -> int:
        with frail.http() as client:
            return client.get("/health").status_code

    with frail.openai() as client:
        stream = client.completions.create(
            model="built-in", prompt=PROMPT, max_tokens=450, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        first = frail.engine
        os.kill(first.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)
        assert time.monotonic() - began < 2
        assert health() == 503
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="built-in", prompt="x")
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
        until("the engine comes back", lambda: health() == 200)
        assert frail.engine.pid != first.pid
        [expected] = offline([PROMPT], temperature=0, max_tokens=20)
        again = client.completions.create(model="built-in", prompt=PROMPT, temperature=0, max_tokens=20)
        assert again.choices[0].text == expected.text
        assert gauges(frail)["stride_engine_restarts_total"] == 1
        os.kill(frail.engine.pid, signal.SIGKILL)
        until("the server says that it stays down", lambda: "not started again" in frail.http().get("/health").text)
    assert frail.stop() == 0, frail.log.read_text(encoding="utf-8")


def test_the_server_is_killed(frail: Served) -> None:
    """The engine does not outlive the server."""
    engine = frail.engine
    frail.process.kill()
    until("the engine ends too", lambda: not runs(engine), 15)


def test_ending(frail: Served) -> None:
    """Running requests get time to finish, new ones are refused, and at the deadline the rest end with a reason."""
    with frail.openai() as client, frail.openai() as other:
        short = client.completions.create(
            model="built-in", prompt=PROMPT, max_tokens=10, stream=True, extra_body={"ignore_eos": True}
        )
        long = other.completions.create(
            model="built-in",
            prompt=PROMPT,
            max_tokens=480,
            n=64,  # more than any machine makes in two seconds
            stream=True,
            extra_body={"ignore_eos": True, "speculation": "off", "logprobs": 5},
        )
        next(iter(short)), next(iter(long))
        late = frail.http()
        assert late.get("/health").status_code == 200
        frail.process.send_signal(signal.SIGTERM)
        until("new requests are turned away", lambda: late.get("/health").status_code == 503, 2)
        refused = late.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert [event.choices[0].finish_reason for event in short][-1] == "length"
        ends = [choice.finish_reason for event in long for choice in event.choices if choice.finish_reason]
        assert len(ends) == 64 and set(ends) <= {"abort", "length"} and "abort" in ends
    assert frail.process.wait(20) == 0, frail.log.read_text(encoding="utf-8")
