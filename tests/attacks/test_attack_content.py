"""The size of a request is checked before anything is built from it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from attacks.content_attacks import departed_texts, post
from support.doubles.server import Served, until, working


def peaks(served: Served) -> dict[int, float]:
    """Peak MiB of the server and its engine, by process. Workers have a limit of their own."""
    processes = [psutil.Process(served.process.pid), served.engine]
    statuses = {one.pid: Path(f"/proc/{one.pid}/status").read_text(encoding="utf-8") for one in processes}
    return {pid: int(text.partition("VmHWM:")[2].split()[0]) / 1024 for pid, text in statuses.items()}


@pytest.mark.parametrize("name", ["many samples of a long prompt", "many samples of a long prompt, SGLang's"])
def test_a_prompt_is_measured_once(stormed: Served, name: str) -> None:
    """Before it is multiplied by its samples: a prompt that is too long is refused, and costs only its body."""
    before = peaks(stormed)
    answer = post(stormed.url, name)
    assert answer.status_code == 400 and "max_model_len" in answer.json()["error"]["message"], answer.text
    after = peaks(stormed)
    assert all(after[pid] - before[pid] < 150 for pid in before)


def test_texts_of_clients_that_left(stormed: Served) -> None:
    """Their tokenisation is cancelled."""
    departed_texts(stormed.url)
    until("no worker is busy", lambda: working(stormed) == 0, 5)
    began = time.monotonic()
    with stormed.http() as client:
        assert client.post("/tokenize", json={"prompt": "def f(x):\n" * 20_000}).json()["count"] == 100_000
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_long_stop_strings(stormed: Served, path: str) -> None:
    """Each character is a state of a search, for each sample: as many are allowed as a request needs, and no more."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 1}},
    }
    body = bodies[path]
    where = body.get("sampling_params", body)
    with stormed.http() as client:
        for stop, status in ((["s" * 8000, "t"], 200), (["s" * 5000, "t" * 5000], 400), ("s" * 9000, 400)):
            where["stop"] = stop
            answer = client.post(path, json=body)
            assert answer.status_code == status, answer.text
            assert status == 200 or "8192" in answer.json()["error"]["message"]
    if path == "/v1/completions":
        assert post(stormed.url, "long stop strings").status_code == 400


def test_more_scores_than_an_answer_may_have(stormed: Served) -> None:
    """They are counted before they reach the engine."""
    body = {"prompt": [[300] * 500] * 100, "prompt_logprobs": 64, "max_tokens": 1}
    with stormed.http() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400 and "max_prompt_scores" in answer.json()["error"]["message"]
