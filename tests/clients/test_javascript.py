"""Clients from npm: OpenAI's own, and Vercel's AI SDK."""

from __future__ import annotations

from clients.asked import Place
from clients.programs import node_client
from support.doubles.server import Served


def test_openai(served: Served) -> None:
    found = node_client("openai", served.url)
    assert Place(**found["called"]) == Place(**found["called streamed"]) == Place(**found["called event"])
    assert Place(**found["structured"]) == Place(**found["structured streamed"])


def test_ai_sdk(served: Served) -> None:
    found = node_client("ai_sdk", served.url)
    for provider in ("compatible", "openai", "responses"):
        whole, streamed = Place(**found[f"{provider} structured"]), Place(**found[f"{provider} structured streamed"])
        assert whole == streamed or provider == "responses"  # which have no seed
        assert Place(**found[f"{provider} called streamed"])
        assert found[f"{provider} finish"] == ["tool-calls", True]
        loop = found[f"{provider} loop"]
        assert len(loop) == 5 and min(loop) >= 1
