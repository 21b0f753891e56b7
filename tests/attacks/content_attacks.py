"""Contents of a single request that could stop a server, or exhaust its memory: each is refused or served, and costs
other clients next to nothing. For the tests beside this file, and for runs that mix them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import httpx2 as httpx

from attacks.raw import credentials

PATIENCE_S = 60.0
Body = Callable[[], tuple[str, bytes]]


def _json(path: str, **body: Any) -> tuple[str, bytes]:
    return path, json.dumps(body).encode()


def _keys(count: int) -> dict[str, int]:
    return {f"key {i}": i for i in range(count)}


def schema(seed: int) -> dict[str, Any]:
    """Half a megabyte that takes longer to compile than it may; each seed gives another schema."""
    patterns = {f"k{i}": {"type": "string", "pattern": f"[a-z]{{1,{2 + i % 9}}}"} for i in range(9000)}
    return {"type": "object", "properties": {f"seed {seed}": {"type": "null"}, **patterns}}


BODIES: dict[str, Body] = {
    "many samples of a long prompt": lambda: _json("/v1/completions", prompt=[300] * 400_000, n=128),
    "many samples of a long prompt, SGLang's": lambda: _json(
        "/generate", input_ids=[300] * 400_000, sampling_params={"n": 128}
    ),
    "invalid ids": lambda: _json("/v1/completions", prompt=[-1] * 750_000),
    "invalid ids, SGLang's": lambda: _json("/generate", input_ids=[-1] * 750_000),
    "unknown keys": lambda: _json("/v1/completions", prompt="x", **_keys(500_000)),
    "unknown keys, SGLang's": lambda: _json("/generate", text="x", **_keys(500_000)),
    "unknown keys in every message": lambda: _json(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x", **_keys(2000)}] * 200
    ),
    "a thousand texts": lambda: _json("/v1/completions", prompt=["def f(x): " * 1500] * 1024, max_tokens=1),
    "a thousand short texts": lambda: _json("/v1/completions", prompt=["def f(x): return"] * 1024, max_tokens=1),
    "a text of many megabytes": lambda: _json("/v1/completions", prompt="def f(x):\n" * 1_500_000),
    "a text of many megabytes to measure": lambda: _json("/tokenize", prompt="def f(x):\n" * 1_500_000),
    "many ids to read": lambda: _json("/detokenize", tokens=[300] * 2_500_000),
    "many tools": lambda: _json(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": {"name": f"f{i}", "description": "d" * 13_000}} for i in range(1024)],
        max_tokens=1,
    ),
    "top tokens of many prompts": lambda: _json(
        "/v1/completions", prompt=[[300 + i] * 500 for i in range(30)], prompt_logprobs=64, max_tokens=1
    ),
    "top tokens of many prompts, SGLang's": lambda: _json(
        "/generate",
        input_ids=[[300 + i] * 500 for i in range(30)],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=64,
        sampling_params={"max_new_tokens": 1},
    ),
    "parameters for each of a thousand prompts": lambda: _json(
        "/generate", input_ids=[[300]] * 1024, sampling_params=[{"max_new_tokens": 1, "temperature": 0.5}] * 1024
    ),
    "long stop strings": lambda: _json(
        "/v1/completions", prompt="x", n=128, max_tokens=1, stop=[f"{i} " * 4000 for i in range(100)]
    ),
    "a simulated rule": lambda: _json("/v1/completions", prompt="x", speculation={"acceptance": "synthetic:2.5"}),
    "a schema without end": lambda: _json("/v1/completions", prompt="x", guided_json=schema(0)),
    "brackets without end": lambda: ("/v1/completions", b"[" * 4_000_000),
}


@cache
def body_of(name: str) -> tuple[str, bytes]:
    return BODIES[name]()


def post(url: str, name: str) -> httpx.Response:
    """The response to one of BODIES."""
    path, body = body_of(name)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        return client.post(path, content=body, headers={"content-type": "application/json", **credentials()})


def leave(url: str, path: str, body: bytes, after_s: float) -> None:
    """Send it and disconnect without reading the response."""
    host, port = url.removeprefix("http://").split(":")
    lines = (
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in credentials().items()),
    )
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall("\r\n".join((*lines, "", "")).encode() + body)  # if it is not closed for another
        time.sleep(after_s)


def departed_schemas(url: str, count: int = 6, first: int = 1) -> None:
    """Schemas that never finish compiling, from clients that have left by the time this returns."""
    bodies = [_json("/v1/completions", prompt="x", guided_json=schema(first + i)) for i in range(count)]
    leaving = [threading.Thread(target=leave, args=(url, path, body, 0.5)) for path, body in bodies]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()


def departed_texts(url: str, count: int = 4) -> None:
    """Megabytes of text to tokenise, from clients that have left."""
    path, body = body_of("a text of many megabytes to measure")
    leaving = [threading.Thread(target=leave, args=(url, path, body, 0.5)) for _ in range(count)]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()


def long_stream(url: str) -> None:
    """A stream that repeats its whole text with every token."""
    body = {"text": "x", "sampling_params": {"max_new_tokens": None, "ignore_eos": True}, "stream": True}
    options: dict[str, Any] = {"base_url": url, "timeout": PATIENCE_S, "headers": credentials()}
    with httpx.Client(**options) as client, client.stream("POST", "/generate", json=body) as got:
        for _ in got.iter_raw():
            pass


def _sending(name: str) -> Callable[[str], None]:
    def attack(url: str) -> None:
        post(url, name)

    return attack


CONTENT_ATTACKS: dict[str, Callable[[str], None]] = {
    **{name: _sending(name) for name in BODIES},
    "schemas of clients that left": departed_schemas,
    "texts of clients that left": departed_texts,
    "a stream that repeats itself": long_stream,
}
"""Name -> function that sends it to a server, given its URL. Each ends within PATIENCE_S, whatever the response."""
