"""Usage: with `continuous_usage_stats` every event tells it so far; what was drafted is told of the whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.doubles.server import Served

LONG = "def fibonacci(n):\n    return n\n\n" * 12
MTP = {"drafter": "mtp", "depth": 3}
"""What is drafted is the same each time, since nothing of it depends on how long steps take."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "chat, two samples": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "n": 2}),
    "completions": ("/v1/completions", {"prompt": LONG}),
    "echo": ("/v1/completions", {"prompt": LONG, "echo": True, "n": 2}),
    "only echo": ("/v1/completions", {"prompt": LONG, "echo": True, "max_tokens": 0}),
}


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_event_has_usage(served: Served, case: str, at_end: bool) -> None:
    """Its cached tokens are those of the whole answer in every event, the first one included; completion tokens only
    grow, from 0 in the events before any output to their final number."""
    route, asked = CASES[case]
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "speculation": MTP, **asked}
    options = {"include_usage": at_end, "continuous_usage_stats": True}
    with served.http() as client:
        client.post(route, json=body).raise_for_status()  # the prompt is cached now
        whole = client.post(route, json=body).json()["usage"]
        text = client.post(route, json={**body, "stream": True, "stream_options": options}).text
    events = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part.startswith("data: {")]
    usages = [event["usage"] for event in events]
    assert whole["prompt_tokens_details"]["cached_tokens"] > 0
    assert all(usage["prompt_tokens_details"] == whole["prompt_tokens_details"] for usage in usages)
    assert all(usage["prompt_tokens"] == whole["prompt_tokens"] for usage in usages)
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and usages[-1] == whole
    opening = sum(_opens(event["choices"][0]) for event in events if event["choices"])
    assert opening == (0 if case == "completions" else asked.get("n", 1))
    assert counts[:opening] == [0] * opening


@pytest.mark.parametrize("more", [{}, {"stop": "return"}, {"n": 3}, {"speculation": "off"}], ids=str)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_predictions(served: Served, route: str, more: dict[str, Any]) -> None:
    """Accepted and rejected tokens are all that were drafted, over all samples. The accepted ones are part of the
    output: what a stop string cut off was rejected. A stream tells the same."""
    _, asked = CASES["chat" if "chat" in route else "completions"]
    body = {"max_tokens": 40, "temperature": 0.5, "seed": 5, "speculation": MTP, **asked, **more}
    options = {"include_usage": True, "continuous_usage_stats": True}
    with served.http() as client:
        whole = client.post(route, json=body).json()
        text = client.post(route, json={**body, "stream": True, "stream_options": options}).text
    events = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part.startswith("data: {")]
    drafted = sum(choice["speculation"]["drafted"] for choice in whole["choices"])
    details = whole["usage"]["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert accepted + rejected == drafted
    assert accepted < whole["usage"]["completion_tokens"] and rejected >= 0
    assert (accepted > 0) == ("speculation" not in more)
    counts = [event["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == accepted
    if "stop" not in more:  # the steps that run on after a stop string depend on when it is met
        assert accepted == sum(choice["speculation"]["accepted"] for choice in whole["choices"])
        assert events[-1]["usage"]["completion_tokens_details"] == details


def _opens(choice: dict[str, Any]) -> bool:
    """Whether the event comes before any output: the role, or the echo."""
    return "role" in choice["delta"] if "delta" in choice else choice["text"].startswith(LONG[:20])
