"""Keys, limits and options: one server with small limits, set by file, environment and command line."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any

import openai
import pytest

from stridelm.cli.main import build_parser
from stridelm.cli.serve import read_configs
from stridelm.server.listen import listen
from support.doubles.server import PROMPT, Served, gauges, serving, settle, until

KEY = "open-sesame"
LONG = {
    "model": "small",
    "prompt": PROMPT,
    "max_tokens": 480,
    "logprobs": 20,
    "extra_body": {"ignore_eos": True, "speculation": "off"},
}
"""Takes seconds anywhere."""
LINKS = {"STRIDE_PORT": "tcp://10.0.0.1:80", "STRIDE_SERVICE_HOST": "10.0.0.1", "STRIDE_SERVICE_PORT": "80"}
"""Variables that Kubernetes adds for a service called stride."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("narrow")
    file = path / "serve.yaml"
    file.write_text(
        "max-queue: 2\nmax-queue-per-key: 2\nserved-model-name: [small, tiny]\nmax_body_mib: 3\nlog-json: true\n",
        "utf-8",
    )
    environment = {"STRIDE_API_KEY": f"other,{KEY}", "STRIDE_MAX_BODY_MIB": "0.25", **LINKS}
    with serving(path, "--config", str(file), "--request-timeout", "1.5", environment=environment) as served:
        yield served
        settle(served)
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def test_pieces_are_sent_at_once() -> None:
    """Whoever answers at the server's socket never waits until the last piece is acknowledged (Nagle's algorithm)."""

    async def answering() -> bool:
        nodelay = asyncio.get_running_loop().create_future()

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            socket = writer.get_extra_info("socket")
            nodelay.set_result(socket.getsockopt(IPPROTO_TCP, TCP_NODELAY) != 0)
            writer.close()

        async with await asyncio.start_server(answer, sock=listen("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            found = await nodelay
            writer.close()
        return found

    assert asyncio.run(answering())


@pytest.mark.parametrize("key", ["wrong", "", KEY + "x", KEY[:-1], "é"])
def test_a_wrong_key(narrow: Served, key: str) -> None:
    with narrow.http(headers={"authorization": f"Bearer {key}".strip().encode()}) as client:
        answer = client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


def test_who_needs_a_key(narrow: Served) -> None:
    """Everything except what operators monitor; either key is accepted."""
    with narrow.http() as client:
        assert [client.get(path).status_code for path in ("/health", "/metrics", "/v1/models")] == [200, 200, 401]
    for key in ("other", KEY):
        with narrow.openai(key) as client:
            assert [model.id for model in client.models.list()] == ["small", "tiny"]
            answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)
            assert answer.model == "small"


@pytest.mark.parametrize("told", [True, False])
def test_a_body_too_large(narrow: Served, told: bool) -> None:
    """Refused whether or not its length is announced, and the connection's next request is served."""
    body = b'{"prompt": "' + b"x" * 300_000 + b'"}'
    with narrow.http(headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"}) as client:
        answer = client.post("/v1/completions", content=body if told else iter([body[:9000], body[9000:]]))
        assert answer.status_code == 413 and "max_body_mib" in answer.json()["error"]["message"]
        assert client.get("/v1/models").status_code == 200


def test_a_full_queue(narrow: Served) -> None:
    """Requests over the limit get 429; running ones are unaffected."""
    with narrow.openai(KEY) as client:
        running = client.completions.create(**LONG, n=2, stream=True)
        next(iter(running))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="small", prompt="x", max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        running.close()
        until("the client's leaving is noticed", lambda: served_again(client))


def served_again(client: openai.OpenAI) -> bool:
    try:
        return bool(client.completions.create(model="small", prompt="x", max_tokens=1).choices)
    except openai.RateLimitError:
        return False


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(narrow: Served, stream: bool) -> None:
    """An error, before the stream or in it, and its pages are freed."""
    with narrow.openai(KEY) as client:
        if stream:
            events = iter(client.completions.create(**LONG, n=2, stream=True))
            next(events)
            with pytest.raises(openai.APIError, match="request_timeout"), narrow.standing_still():
                list(events)
        else:
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(client.completions.create, **LONG, n=2)
                until("it runs", lambda: gauges(narrow)["stride_requests_running"] == 2)
                with narrow.standing_still():
                    error = answer.exception()
            assert isinstance(error, openai.APIStatusError) and error.status_code == 408
    assert settle(narrow, 1.0)["stride_requests_running"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_stands_still_accepts_nothing(narrow: Served, stream: bool) -> None:
    """The limit holds for requests that the engine has not even accepted."""
    with narrow.openai(KEY) as client:
        until("earlier requests are gone", lambda: served_again(client))
        with narrow.standing_still(), pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**LONG, stream=stream)
        assert caught.value.status_code == 408
        until("it serves again", lambda: served_again(client))
    assert settle(narrow, 1.0)["stride_requests_running"] == 0


def test_a_request_leaves_one_line(narrow: Served) -> None:
    """A JSON object with its cost, and without its prompt."""

    def logged() -> list[dict[str, Any]]:
        return [json.loads(line) for line in narrow.log.read_text(encoding="utf-8").splitlines() if line[:1] == "{"]

    with narrow.openai(KEY) as client:
        client.completions.create(model="small", prompt=PROMPT, max_tokens=7, extra_body={"ignore_eos": True})
    until("the line is there", lambda: any(line.get("tokens") == 7 for line in logged()), 5)
    [line] = [line for line in logged() if line.get("tokens") == 7]
    assert (line["status"], line["route"], line["drafter"]) == (200, "/v1/completions", "hybrid")
    assert line["tokens_per_step"] >= 1
    assert "class Stack" not in narrow.log.read_text(encoding="utf-8") and KEY not in str(logged())


def test_service_links_are_named(narrow: Served) -> None:
    """One line of the log says which variables were ignored, and what keeps them out."""
    lines = [
        line for line in narrow.log.read_text(encoding="utf-8").splitlines() if "enableServiceLinks: false" in line
    ]
    assert len(lines) == 1 and all(name in lines[0] for name in LINKS)


def parsed(*words: str) -> argparse.Namespace:
    return build_parser("serve").parse_args(["serve", *words])


def test_who_wins(tmp_path: Path) -> None:
    """The command line overrides the environment, which overrides the file; values have the fields' types."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        "port: 1\nmax-num-seqs: 3\ndepth: 2\nstrict: true\nhost: ::1\nper-request-spec-decode-metrics: none\n", "utf-8"
    )
    environment = {"STRIDE_PORT": "2", "STRIDE_DEPTH": "4", "STRIDE_ENABLE_PREFIX_CACHING": "false", "HOME": "/"}
    environment["STRIDE_PER_REQUEST_SPEC_DECODE_METRICS"] = "summary"
    server, engine = read_configs(parsed("--config", str(file), "--depth", "5"), environment)
    assert (server.port, server.host, engine.max_num_seqs) == (2, "::1", 3)
    assert (engine.depth, engine.strict, engine.enable_prefix_caching) == (5, True, False)
    assert engine.per_request_spec_decode_metrics == "summary"


@pytest.mark.parametrize(
    ("words", "environment", "content", "message"),
    [
        ((), {"STRIDE_PROT": "1"}, "", "prot"),
        ((), {}, "prot: 1", "prot"),
        ((), {}, "- 1", "contains no options"),
        ((), {}, "a: [", "cannot be read"),
        ((), {}, "skip-tokenizer-init: true", "skip_tokenizer_init"),
        (("--port", "70000"), {}, "", "port"),
        (("--protect-metrics",), {}, "", "api_key"),
        (("--api-key", ""), {}, "", "api_key"),
        (("--chat-template", "/no/such/file"), {}, "", "chat_template"),
        ((), {}, "max-queue: many", "max_queue"),
        ((), {}, "per-request-spec-decode-metrics: all", "choose none, summary or detailed"),
        ((), {}, "per-request-spec-decode-metrics: true", "choose none, summary or detailed"),
    ],
    ids=str,
)
def test_refused_options(
    tmp_path: Path, words: tuple[str, ...], environment: dict[str, str], content: str, message: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content, "utf-8")
    with pytest.raises(ValueError, match=message):
        read_configs(parsed("--config", str(file), *words), environment)
