"""LiteLLM: calls and structured output, whole and streamed. Prints what each read, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

from clients.asked import QUESTION, SAMPLING, Place

asked: dict[str, Any] = {
    "model": "openai/built-in", "api_base": sys.argv[1], "api_key": "none", "max_retries": 0,
    "messages": [{"role": "user", "content": QUESTION}], **SAMPLING,
}  # fmt: skip
function = {"name": "look", "parameters": Place.model_json_schema()}
called: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
called["parallel_tool_calls"] = False
found: dict[str, Any] = {}


def read(name: str, response: Any) -> None:
    [choice] = response.choices
    [call] = choice.message.tool_calls or [None]
    found[name] = json.loads(choice.message.content if call is None else call.function.arguments)
    found[f"{name} finish"], found[f"{name} tokens"] = choice.finish_reason, response.usage.completion_tokens


read("called", litellm.completion(**asked, **called))
chunks = list(litellm.completion(**asked, **called, stream=True, stream_options={"include_usage": True}))
read("called streamed", litellm.stream_chunk_builder(chunks, messages=asked["messages"]))
read("structured", litellm.completion(**asked, response_format=Place))
chunks = list(litellm.completion(**asked, response_format=Place, stream=True, stream_options={"include_usage": True}))
read("structured streamed", litellm.stream_chunk_builder(chunks, messages=asked["messages"]))
print(json.dumps(found))
