"""One key cannot affect another key's requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.doubles.server import PROMPT, Served, serving, settle, until

ONE, OTHER, OPERATOR = "one-key", "other-key", "operator-key"
LONG = {"max_new_tokens": 450, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = ("--api-key", ONE, "--api-key", OTHER, "--operator-key", OPERATOR)
    bounds = ("--max-queue", "8", "--min-priority", "-1", "--max-queue-per-key", "4")
    with serving(tmp_path_factory.mktemp("keyed"), *keys, *bounds) as served:
        yield served
        settle(served)
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")
        assert not any(key in served.log.read_text(encoding="utf-8") for key in (ONE, OTHER, OPERATOR))


def bearing(served: Served, key: str) -> Any:
    return served.http(headers={"authorization": f"Bearer {key}"})


@pytest.fixture
def running(keyed: Served) -> Iterator[dict[str, Any]]:
    """A long request with key ONE and rid r, and its response once it is there."""
    found: dict[str, Any] = {}

    def ask() -> None:
        with bearing(keyed, ONE) as client:
            body = {"text": PROMPT, "rid": "r", "sampling_params": {**LONG, "n": 2}}
            found["answer"] = client.post("/generate", json=body).json()

    asking = threading.Thread(target=ask)
    asking.start()
    with bearing(keyed, OPERATOR) as client:
        until("it runs", lambda: client.get("/get_load").json()[0]["num_reqs"] == 2, 10)
        yield found
        client.post("/abort_request", json={"abort_all": True}).raise_for_status()
    asking.join()
    settle(keyed)


def test_abort(keyed: Served, running: dict[str, Any]) -> None:
    """By name or all at once: another key's request continues, one's own ends, and an operator can end any."""
    with bearing(keyed, OTHER) as client:
        for body in ({"rid": "r"}, {"rid": "r_0"}, {"abort_all": True}):
            assert client.post("/abort_request", json=body).status_code == 200  # as for any unknown name
        assert client.get("/get_load").json()[0]["num_reqs"] == 2
        own = {"text": PROMPT, "rid": "r", "sampling_params": {"max_new_tokens": 2}}
        assert client.post("/generate", json=own).status_code == 200  # the name is not taken for this key
    with bearing(keyed, ONE) as client:
        client.post("/abort_request", json={"rid": "r_0"})
        until("the own request has ended", lambda: client.get("/get_load").json()[0]["num_reqs"] == 1, 10)
    with bearing(keyed, OPERATOR) as client:
        client.post("/abort_request", json={"rid": "r"})
        until("all requests have ended", lambda: client.get("/get_load").json()[0]["num_reqs"] == 0, 10)
    until("it is answered", lambda: "answer" in running, 5)


def test_flush(keyed: Served) -> None:
    for key, status in ((ONE, 403), (OPERATOR, 200)):
        with bearing(keyed, key) as client:
            assert client.post("/flush_cache").status_code == status


@pytest.mark.parametrize(("key", "priority", "status"), [(ONE, -1, 200), (ONE, -2, 403), (OPERATOR, -100, 200)])
def test_priority(keyed: Served, key: str, priority: int, status: int) -> None:
    """In both APIs, which have opposite signs."""
    with bearing(keyed, key) as client:
        own = {"prompt": "x", "max_tokens": 1, "priority": priority}
        native = {"text": "x", "sampling_params": {"max_new_tokens": 1}, "priority": -priority}
        for route, body in (("/v1/completions", own), ("/generate", native)):
            answer = client.post(route, json=body)
            assert answer.status_code == status, answer.text
            assert status == 200 or "min_priority" in answer.json()["error"]["message"]


def test_places(keyed: Served, running: dict[str, Any]) -> None:
    """One key cannot take all places: the other key's request is served beside a full share."""
    with keyed.openai(ONE) as client, keyed.openai(OTHER) as other:
        with pytest.raises(openai.RateLimitError, match="max_queue_per_key"):
            client.completions.create(model="built-in", prompt="x", max_tokens=1, n=3)
        assert client.completions.create(model="built-in", prompt="x", max_tokens=1, n=2).choices
        assert other.completions.create(model="built-in", prompt="x", max_tokens=1, n=4).choices


def test_server_info(keyed: Served) -> None:
    """Only an operator sees the options, and nobody sees the keys."""
    with bearing(keyed, ONE) as client, bearing(keyed, OPERATOR) as operator:
        visible, everything = client.get("/server_info").json(), operator.get("/server_info").json()
        assert visible["context_length"] == 512 and "max_queue" not in visible
    assert everything["max_queue"] == 8 and not any(key in json.dumps(everything) for key in (ONE, OTHER, OPERATOR))
