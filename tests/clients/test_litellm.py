"""LiteLLM, in a process of its own."""

from __future__ import annotations

from clients.asked import Place, client_library
from clients.programs import python_client
from support.doubles.server import Served

client_library("httpx")  # of the extra `clients`; LiteLLM uses it beside openai
client_library("tiktoken")  # of the extra `harness`


def test_calls_and_structure(served: Served) -> None:
    found = python_client("litellm", served.url)
    for name, finish in (("called", "tool_calls"), ("structured", "stop")):
        assert Place(**found[name]) == Place(**found[f"{name} streamed"])
        assert found[f"{name} finish"] == found[f"{name} streamed finish"] == finish
        assert found[f"{name} tokens"] == found[f"{name} streamed tokens"] > 0
