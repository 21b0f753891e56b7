"""What answers say of single tokens, joined, is their text: whole or streamed, in every form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.doubles.server import PROMPT, Served

ODD: dict[str, Any] = {"temperature": 4.0, "max_tokens": 40, "ignore_eos": True, "n": 2}
"""Tokens drawn almost evenly: many are parts of characters, and some are special."""
SHOWN = re.compile(r"(?:\\x[0-9a-f]{2})+")


def data_of(token: str) -> bytes:
    """A token's bytes, as completions write them."""
    if token.startswith("bytes:"):
        assert SHOWN.fullmatch(token.removeprefix("bytes:"))
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


def settings_of(served: Served) -> Iterator[dict[str, Any]]:
    """Requests that cut texts in every way."""
    for seed in range(3):
        for skip in (True, False):
            body = {**ODD, "seed": seed, "skip_special_tokens": skip}
            yield body
            with served.http() as client:
                choices = client.post("/v1/completions", json={"prompt": PROMPT, **body}).json()["choices"]
            text = choices[0]["text"].replace("\ufffd", "")
            stop = [text[5:7], text[12:16]]
            yield {**body, "stop": stop}
            yield {**body, "stop": stop, "include_stop_str_in_output": True}


def events_of(served: Served, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with served.http() as client:
        lines = client.post(route, json={**body, "stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]


def choices_of(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def test_completions(served: Served) -> None:
    """`tokens` are the text, and `text_offset` says where each begins; a token is among its own alternatives. Events
    together have what the whole answer has."""
    odd = 0
    for body in settings_of(served):
        body = {"prompt": PROMPT, "logprobs": 2, **body}
        with served.http() as client:
            whole = client.post("/v1/completions", json=body).json()["choices"]
        events = events_of(served, "/v1/completions", body)
        for choice in whole:
            scored = choice["logprobs"]
            parts = [data_of(token) for token in scored["tokens"]]
            assert b"".join(parts).decode(errors="replace") == choice["text"]
            odd += sum(token.startswith("bytes:") for token in scored["tokens"])
            begins = [len(b"".join(parts[:at]).decode(errors="replace")) for at in range(len(parts))]
            within = [begin - 1 for begin in begins]  # inside the character before
            assert all(at in pair for at, pair in zip(scored["text_offset"], zip(begins, within), strict=True))
            assert all(token in top for token, top in zip(scored["tokens"], scored["top_logprobs"], strict=True))
            streamed = choices_of(events, choice["index"])
            assert "".join(part["text"] for part in streamed) == choice["text"]
            for name, values in scored.items():
                assert [value for part in streamed if part["logprobs"] for value in part["logprobs"][name]] == values
    assert odd


def test_echo(served: Served) -> None:
    """With `echo`, the prompt's tokens come first, special ones left out or not, and offsets go on after it."""
    for body in settings_of(served):
        prompt = "<|im_start|>" + PROMPT + "日本"
        with served.http() as client:
            whole = client.post("/v1/completions", json={"prompt": prompt, "logprobs": 2, "echo": True, **body}).json()
            alone = client.post("/v1/completions", json={"prompt": prompt, "logprobs": 2, **body}).json()
        for echoed, choice in zip(whole["choices"], alone["choices"], strict=True):
            scored, own = echoed["logprobs"], choice["logprobs"]
            parts = [data_of(token) for token in scored["tokens"]]
            assert b"".join(parts).decode(errors="replace") == echoed["text"]
            count, before = len(parts) - len(own["tokens"]), len(echoed["text"]) - len(choice["text"])
            assert scored["tokens"][count:] == own["tokens"]
            assert scored["text_offset"][count:] == [at + before for at in own["text_offset"]]
            assert scored["text_offset"][:count] == sorted(scored["text_offset"][:count])


def test_chat(served: Served) -> None:
    """`bytes` of the content's tokens are the message; those of an alternative are its own."""
    for body in settings_of(served):
        body = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 3, **body}
        with served.http() as client:
            whole = client.post("/v1/chat/completions", json=body).json()["choices"]
        events = events_of(served, "/v1/chat/completions", body)
        for choice in whole:
            content = choice["logprobs"]["content"]
            data = bytes(byte for entry in content for byte in entry["bytes"])
            assert data.decode(errors="replace") == choice["message"]["content"]
            for entry in content:
                assert all(data_of(one["token"]) == bytes(one["bytes"]) for one in entry["top_logprobs"])
            streamed = choices_of(events, choice["index"])
            scored = [part["logprobs"]["content"] for part in streamed if part.get("logprobs")]
            assert [entry for part in scored for entry in part] == content


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_cut_inside_a_character(served: Served, route: str) -> None:
    """An output that max_tokens ends within a character has the bytes of the tokens that it has."""
    asked = {"prompt": "s = "} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "s = "}]}
    scored: Any = {"logprobs": 1} if route == "/v1/completions" else {"logprobs": True}
    whole = "日本".encode()
    for count in range(1, 7):
        body = {**asked, **scored, "max_tokens": count, "guided_choice": ["日本"]}
        with served.http() as client:
            [choice] = client.post(route, json=body).json()["choices"]
        if route == "/v1/completions":
            data = b"".join(map(data_of, choice["logprobs"]["tokens"]))
            text = choice["text"]
        else:
            data = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
            text = choice["message"]["content"]
        assert data and whole.startswith(data) and data.decode(errors="replace") == text
