"""What the APIs for agents have in common: reasoning as in chat, keys, and errors within streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from support.doubles.server import CHATML, Served, serving, settle

TEXT = "Where is it?"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}]},
}
LENGTHS = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a key, whose template opens the reasoning."""
    directory = tmp_path_factory.mktemp("thinking")
    template = directory / "thinking.jinja"
    template.write_text(CHATML.replace("<|assistant|>", "<|assistant|><think>\n"), encoding="utf-8")
    options = ("--chat-template", str(template), "--reasoning-parser", "qwen3", "--api-key", "secret")
    with serving(directory, *options, "--request-timeout", "4", template=False) as served:
        yield served
        settle(served)
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def parts_of(route: str, answer: dict[str, Any]) -> tuple[str, str, int]:
    """The reasoning of an answer, its content, and the tokens of the reasoning."""
    found = {"reasoning": "", "content": ""}
    for block in answer["output" if route == "/v1/responses" else "content"]:
        if block["type"] in ("reasoning", "thinking"):
            found["reasoning"] += block["thinking"] if "thinking" in block else block["content"][0]["text"]
        else:
            found["content"] += block["text"] if "text" in block else block["content"][0]["text"]
    details = answer["usage"]["output_tokens_details"]
    return found["reasoning"], found["content"], details.get("reasoning_tokens", details.get("thinking_tokens"))


def built(route: str, events: list[dict[str, Any]]) -> tuple[str, str]:
    """Reasoning and content, from the deltas."""
    found = {"reasoning": "", "content": ""}
    for event in events:
        delta = event.get("delta", "")
        if route == "/v1/responses" and event["type"].endswith("_text.delta"):
            found["reasoning" if "reasoning" in event["type"] else "content"] += delta
        elif event["type"] == "content_block_delta":
            found["reasoning"] += delta.get("thinking", "")
            found["content"] += delta.get("text", "")
    return found["reasoning"], found["content"]


@pytest.mark.parametrize("route", BODIES)
def test_reasoning(thinking: Served, route: str) -> None:
    """As chat has it, whole and streamed, and counted. The model is made to write hardly anything but parts of the mark
    that ends it."""
    both = 0
    with thinking.http(headers=KEY) as client:
        ids = client.post("/tokenize", json={"prompt": "</think> so"}).json()["tokens"]
        for seed in range(4):
            more = {"logit_bias": dict.fromkeys(map(str, ids), 60), "seed": seed, "temperature": 0.8}
            asked = {**BODIES[route], **more, LENGTHS[route]: 60}
            messages = [{"role": "user", "content": TEXT}]
            chat = client.post("/v1/chat/completions", json={"messages": messages, **more, "max_tokens": 60}).json()
            message = chat["choices"][0]["message"]
            expected = (message.get("reasoning_content", ""), message["content"])
            *whole, counted = parts_of(route, client.post(route, json=asked).json())
            events = events_of(client.post(route, json={**asked, "stream": True}).text)
            assert tuple(whole) == built(route, events) == expected
            assert counted == chat["usage"]["completion_tokens_details"]["reasoning_tokens"]
            both += all(expected)
            if route == "/v1/messages":
                omitted = {**asked, "thinking": {"type": "adaptive", "display": "omitted"}}
                assert parts_of(route, client.post(route, json=omitted).json())[:2] == ("", expected[1])
    assert both


@pytest.mark.parametrize("route", BODIES)
def test_an_error_within_a_stream(thinking: Served, route: str) -> None:
    """In the API's own form, as the last event."""
    asked = {**BODIES[route], LENGTHS[route]: 400, "ignore_eos": True, "stream": True}
    with thinking.http(headers=KEY) as client, client.stream("POST", route, json=asked) as answer:
        lines = answer.iter_lines()
        first = [next(lines) for _ in range(12)]
        with thinking.standing_still():
            events = events_of("\n".join([*first, *lines]))
    last = events[-1]
    if route == "/v1/responses":
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert "request_timeout" in last["response"]["error"]["message"]
        assert last["sequence_number"] == len(events) - 1
    else:
        assert last["type"] == "error" and last["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (KEY, 200),
        ({"x-api-key": "secret"}, 200),
        ({"x-api-key": "other"}, 401),
        ({}, 401),
        ({"authorization": "Bearer other", "x-api-key": "secret"}, 401),
    ],
    ids=str,
)
def test_keys(thinking: Served, route: str, headers: dict[str, str], status: int) -> None:
    with thinking.http(headers=headers) as client:
        answer = client.post(route, json={**BODIES[route], LENGTHS[route]: 1})
    assert answer.status_code == status, answer.text
    if status == 401:
        error = answer.json()
        assert "x-api-key" in error["error"]["message"] and error["error"]["type"] == "authentication_error"
        assert ("type" in error) == (route == "/v1/messages")


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(thinking: Served, route: str, stream: bool) -> None:
    """Its sample ends."""
    asked = {**BODIES[route], LENGTHS[route]: 450, "ignore_eos": True, "stream": stream}
    with thinking.http(headers=KEY) as client, thinking.standing_still(), pytest.raises(httpx.TimeoutException):
        client.post(route, json=asked, timeout=0.5)
    settle(thinking)
