"""OpenAI's parameters that cannot change an answer are accepted, with any value, and have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from stridelm.server.openai.inert import InertFields
from support.doubles.server import Served

VALUES: dict[str, list[Any]] = {
    "user": ["u-1"],
    "safety_identifier": ["u-1"],
    "metadata": [{}, {"run": "7", "team": "a"}],
    "store": [True, False],
    "service_tier": ["auto", "default", "flex", "scale", "priority", "fast"],
    "prompt_cache_key": ["k"],
    "prompt_cache_retention": ["in_memory", "in-memory", "24h"],
    "modalities": [["text"]],
    "verbosity": ["low", "medium", "high"],
    "prediction": [
        {"type": "content", "content": "return 1"},
        {"type": "content", "content": [{"type": "text", "text": "return 1"}]},
    ],
    "parallel_tool_calls": [True, False],
}
WRONG: dict[str, list[Any]] = {
    "user": [7],
    "safety_identifier": [["u"]],
    "metadata": [{"a": 1}, {str(i): "" for i in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}, "a"],
    "store": ["yes"],
    "service_tier": ["gold"],
    "prompt_cache_key": [1],
    "prompt_cache_retention": ["1h"],
    "modalities": [["audio"], ["text", "audio"], [], "text"],
    "verbosity": ["loud"],
    "prediction": ["return 1", {"type": "content"}, {"type": "content", "content": [{"type": "image_url"}]}],
    "parallel_tool_calls": ["no"],
}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f(x):"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def f(x):"}]},
}
NOT_THE_ANSWER = ("id", "created", "service_tier")

pytestmark = pytest.mark.parametrize("route", ROUTES)


def ask(served: Served, route: str, **more: Any) -> dict[str, Any]:
    body = {**ROUTES[route], "temperature": 1, "seed": 3, "max_tokens": 6, **more}
    with served.http() as client:
        answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_they_change_no_answer(served: Served, route: str) -> None:
    """Each of them, with each allowed value or null, leaves every choice and the usage unchanged."""
    assert set(VALUES) == set(WRONG) == set(InertFields.model_fields)

    def told(**more: Any) -> dict[str, Any]:
        # At a fixed depth, since a chosen one depends on the time that steps take, and choices tell what was drafted.
        told = ask(served, route, speculation={"drafter": "mtp", "depth": 2}, **more)
        told["usage"].pop("prompt_tokens_details")  # the prefix is cached by now
        return {name: value for name, value in told.items() if name not in NOT_THE_ANSWER}

    plain = told()
    for name, values in VALUES.items():
        assert told(**{name: values[0]}) == plain, name
    for turn in zip(*[[*values, None, None, None, None, None][:6] for values in VALUES.values()]):
        assert told(**dict(zip(VALUES, turn))) == plain


def test_their_types_are_checked(served: Served, route: str) -> None:
    """A value that OpenAI would refuse is refused here, by name."""
    with served.http() as client:
        for name, values in WRONG.items():
            for value in values:
                answer = client.post(route, json={**ROUTES[route], name: value})
                assert answer.status_code == 400, (name, value, answer.text)
                assert answer.json()["error"]["param"].startswith(name)


def test_audio_is_refused_with_what_to_do(served: Served, route: str) -> None:
    with served.http() as client:
        answer = client.post(route, json={**ROUTES[route], "modalities": ["text", "audio"]})
    assert "leave modalities out" in answer.json()["error"]["message"]


def test_the_tier_is_told_to_those_who_ask(served: Served, route: str) -> None:
    """Whichever is requested, the response and each event of a stream name the one used: the only one."""
    assert "service_tier" not in ask(served, route)
    assert ask(served, route, service_tier="flex")["service_tier"] == "default"
    with served.http() as client:
        body = {**ROUTES[route], "max_tokens": 60, "service_tier": "auto", "stream": True}
        lines = [line for line in client.post(route, json=body).text.splitlines() if line[:6] == "data: "]
    assert len(lines) > 2 and all('"service_tier":"default"' in line for line in lines[:-1])
