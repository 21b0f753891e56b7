"""What routers ask of the servers behind them: health, load, a prompt's tokens, names of requests."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from stridelm import __version__
from support.doubles.routers import free_ports
from support.doubles.server import PROMPT, Served, serving, until

# As they arrived from the routers, in November 2026, for a request with stop strings and a drafter.
BODIES: dict[str, dict[str, Any]] = {
    "smg 1.13.0": {
        "messages": [{"role": "user", "content": "hi"}],
        "model": "built-in",
        "logprobs": False,
        "max_tokens": 8,
        "seed": 3,
        "stop": ["x"],
        "stream": False,
        "temperature": 0.0,
        "top_p": 0.9,
        "speculation": "off",
    },
    "vllm-router 0.1.17": {
        "model": "built-in",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.0,
        "top_p": 0.8999999761581421,
        "stream": False,
        "stop": ["x"],
        "max_tokens": 8,
        "seed": 3,
        "logprobs": False,
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "include_reasoning": True,
        "speculation": "off",
    },
}
COMPLETION = {
    "model": "built-in",
    "prompt": "hi",
    "max_tokens": 4,
    "stream": False,
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
"""vllm-router's."""


@pytest.mark.parametrize("router", BODIES)
def test_bodies_of_routers_are_served(router: str, served: Served) -> None:
    """Also by the route that gives their tokens, which are those that the answer has."""
    with served.http() as client:
        path, body = "/v1/chat/completions", {**BODIES[router], "return_token_ids": True}
        answer, rendered = client.post(path, json=body), client.post(f"{path}/render", json=body)
    assert (answer.status_code, rendered.status_code) == (200, 200), (answer.text, rendered.text)
    [choice] = answer.json()["choices"]
    assert choice["speculation"]["drafter"] == "none"
    assert rendered.json()["token_ids"] == choice["prompt_token_ids"]


def test_rendered_requests(served: Served) -> None:
    """vLLM's GenerateRequest: one of a conversation, a list of completions; named after the request."""
    with served.http() as client:
        tokens = client.post("/tokenize", json={"prompt": [PROMPT, "x"]}).json()["tokens"]
        [one] = client.post("/v1/completions/render", json=COMPLETION).json()
        body = {"prompt": [PROMPT, "x"], "stop": "x", "n": 2, "cache_salt": "mine", "priority": 3}
        many = client.post("/v1/completions/render", json=body, headers={"x-request-id": "r7"}).json()
        refused = client.post("/v1/completions/render", json={"prompt": "x", "suffix": "y"})
    assert one["sampling_params"] == {"max_tokens": 4, "n": 1} and one["token_ids"] and one["request_id"]
    assert [entry["token_ids"] for entry in many] == tokens
    assert [entry["request_id"] for entry in many] == ["r7-0", "r7-1"]
    for entry in many:
        assert entry["sampling_params"] == {"stop": ["x"], "n": 2}
        assert (entry["cache_salt"], entry["priority"], entry["stream"], entry["features"]) == ("mine", 3, False, None)
    assert refused.status_code == 400


def test_large_prompts_are_rendered(served: Served) -> None:
    """By a worker; the same as in small bodies."""
    words = [f"def f{number}(items):\n    return items[{number}]\n" for number in range(1000)]
    with served.http() as client:
        large = client.post("/v1/completions/render", json={"prompt": words}).json()
        assert len(json.dumps(words)) > 32 << 10
        small = client.post("/v1/completions/render", json={"prompt": words[:3]}).json()
        conversation = {"messages": [{"role": "user", "content": "x" * 40_000}]}
        too_long = client.post("/v1/chat/completions/render", json=conversation)
    assert [entry["token_ids"] for entry in large[:3]] == [entry["token_ids"] for entry in small]
    assert len(large) == len(words) and too_long.status_code == 400


def test_health(served: Served) -> None:
    """The same at vLLM's names, with or without a body."""
    with served.http() as client:
        for path in ("/health", "/ping"):
            assert client.get(path).json() == {"status": "ok"}
            head = client.head(path)
            assert head.status_code == 200 and not head.content
        assert client.get("/version").json() == {"version": __version__}
        assert client.get("/kv_event_sources").json() == {}


FIELDS = {
    *("dp_rank", "timestamp", "num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_waiting_uncached_tokens"),
    *("num_used_tokens", "num_total_tokens", "max_total_num_tokens", "token_usage", "gen_throughput"),
    *("cache_hit_rate", "utilization", "max_running_requests"),
}


def test_loads(served: Served) -> None:
    """SGLang's shape: sections as asked, and Prometheus' text under its names."""
    with served.http() as client:
        client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}).raise_for_status()

        def load(**query: Any) -> Any:
            answer = client.get("/v1/loads", params=query).raise_for_status().json()
            assert answer["version"] == __version__ and answer["dp_rank_count"] == 1
            return answer["loads"]

        until("the engine has reported", lambda: load()[0]["speculative"]["accept_length"] >= 1, 10)
        [whole] = load()
        assert set(whole) == FIELDS | {"speculative", "queues"}
        assert whole["max_total_num_tokens"] % 16 == 0 < whole["max_total_num_tokens"]
        assert (whole["max_running_requests"], whole["num_running_reqs"], whole["gen_throughput"]) == (8, 0, 0.0)
        assert 0 <= whole["speculative"]["accept_rate"] <= 1
        assert set(load(include="core,disagg,queues,memory")[0]) == FIELDS | {"queues"}
        assert set(load(include="spec", dp_rank=0)[0]) == FIELDS | {"speculative"}
        assert load(dp_rank=1) == []
        text = client.get("/v1/loads", params={"format": "prometheus", "include": "spec"}).text
        for wrong in ({"include": "core,lorry"}, {"format": "xml"}, {"dp_rank": "a"}):
            assert client.get("/v1/loads", params=wrong).status_code == 400
    shown = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    wanted = {f"sglang_{name}" for name in FIELDS - {"dp_rank"}} | {
        "sglang_spec_accept_length",
        "sglang_spec_accept_rate",
    }
    assert set(shown) == wanted
    assert shown["sglang_spec_accept_length"].labels == {"dp_rank": "0"}


def test_loads_of_a_busy_server(served: Served) -> None:
    """What runs, what waits and what it holds; the prompts that wait count in tokens."""
    with served.openai() as client, served.http() as http:
        body = {"prompt": PROMPT * 10, "max_tokens": 150, "n": 12, "stream": True, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(model="built-in", **body)
        next(iter(stream))

        def load() -> dict[str, Any]:
            [one] = http.get("/v1/loads").json()["loads"]
            return dict(one)

        until("every place is taken", lambda: load()["num_running_reqs"] == 8, 10)
        busy = load()
        stream.close()
    assert busy["num_running_reqs"] == 8 and busy["num_waiting_reqs"] == 4 and busy["num_total_reqs"] == 12
    assert busy["num_waiting_uncached_tokens"] >= 4 * 100
    assert 0 < busy["num_used_tokens"] < busy["num_total_tokens"] and 0 < busy["token_usage"] <= 1
    assert busy["utilization"] == 1 and busy["queues"]["waiting"] == 4


@pytest.mark.parametrize("name", ["abc-1", "!~" * 64])
def test_names_of_requests_come_back(name: str, served: Served) -> None:
    """In the answer, also in a stream's and in an error's, and in the log."""
    body, headers = {"prompt": "x", "max_tokens": 1}, {"X-Request-Id": name}
    with served.http(headers=headers) as client:
        answers = [
            client.post("/v1/completions", json=body),
            client.post("/v1/completions", json={**body, "stream": True}),
            client.post("/v1/completions", json={}),
            client.get("/nowhere"),
            client.head("/health"),
        ]
    assert [answer.headers["x-request-id"] for answer in answers] == [name] * len(answers)
    line = re.compile(rf"GET /nowhere 404 \S+ s request_id={re.escape(name)}$", re.MULTILINE)
    until("it is logged", lambda: line.search(served.log.read_text(encoding="utf-8")) is not None, 5)


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "umlaut-\xe4", "tab\tbed"])
def test_names_that_are_ignored(name: str, served: Served) -> None:
    """Those that could break a line, and long ones."""
    with served.http() as client:
        answer = client.get("/health", headers={b"x-request-id": name.encode("latin-1")})
    assert answer.status_code == 200 and "x-request-id" not in answer.headers


def told(port: int) -> list[dict[str, Any]]:
    """The events that the replay endpoint has."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart([b"", bytes(8)])
        events = list[dict[str, Any]]()
        while socket.poll(5000):
            batch = socket.recv_multipart()[-1]
            if not batch:
                return events
            events += msgspec.msgpack.decode(batch)[1]
    raise AssertionError("the replay did not end")


def test_what_routers_read_with_a_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Health without one; with a client's, all that they need to know, also of what is cached. While it drains, health
    says so at once, and refusals come with a time to wait, before anything else is sent."""
    path = tmp_path_factory.mktemp("keyed")
    events, replay = free_ports(2)
    published = {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
    config = json.dumps({"enable_kv_cache_events": True, **published})
    with serving(path, "--api-key", "k", "--operator-key", "o", "--kv-events-config", config) as served:
        with served.http() as client:
            assert [client.get(route).status_code for route in ("/health", "/ping")] == [200, 200]
            closed = ("/version", "/v1/loads", "/get_load", "/kv_event_sources", "/server_info")
            assert {client.get(route).status_code for route in closed} == {401}
        with served.http(headers={"authorization": "Bearer k"}) as client:
            info = client.get("/server_info").json()
            wanted = {"model_id", "served_model_name", "tp_size", "dp_size", "pp_size", "version", "weight_version"}
            wanted |= {"context_length", "max_total_tokens", "max_running_requests", "block_size", "is_embedding"}
            assert wanted <= info.keys() and info["block_size"] == 16
            source = client.get("/kv_event_sources").json()["0"]
            assert published.items() <= source.items() and source["schema_version"] == 1
            client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).raise_for_status()
            tokens = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
            until("its page is told", lambda: len(told(replay)) == 2, 5)
            cleared, stored = told(replay)
            assert cleared == {"type": "AllBlocksCleared"}
            assert stored["token_ids"] == tokens[:16] and "extra_keys" not in stored
            body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True, "stream": True, "speculation": "off"}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                next(stream.iter_lines())
                with served.standing_still():  # or the stream could end, and the server, before it was asked all this
                    served.process.terminate()
                    until("it drains", lambda: client.get("/health").status_code == 503, 10)
                    refused = client.post("/v1/completions", json={**body, "prompt": "x"})
                    health = [client.get("/ping"), client.head("/health")]
        for answer in (refused, *health):
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert refused.headers["content-type"] == "application/json"
        assert served.process.wait(60) == 0
