"""OpenAI's Python client: what it does beyond sending requests."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from clients.asked import QUESTION, SAMPLING, Place
from support.doubles.server import Served

ASKED: dict[str, Any] = {"model": "built-in", "messages": [{"role": "user", "content": QUESTION}], **SAMPLING}
TOOL = openai.pydantic_function_tool(Place)
CALLED: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def test_parsed_arguments(served: Served) -> None:
    with served.openai() as client:
        [choice] = client.chat.completions.parse(**ASKED, **CALLED).choices
    [call] = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Place)


def test_parsed_response(served: Served) -> None:
    with served.openai() as client:
        [choice] = client.chat.completions.parse(**ASKED, response_format=Place).choices
    assert isinstance(choice.message.parsed, Place)


def test_a_cut_response_is_an_error_of_the_client(served: Served) -> None:
    with served.openai() as client, pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**ASKED, "max_tokens": 3}, response_format=Place)


def test_streamed_arguments(served: Served) -> None:
    """Its events and its final message agree with what is not streamed."""
    with served.openai() as client:
        with client.chat.completions.stream(**ASKED, **CALLED) as stream:
            events = list(stream)
            final = stream.get_final_completion()
        [whole] = client.chat.completions.parse(**ASKED, **CALLED).choices
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == done.arguments
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.parsed_arguments == done.parsed_arguments
    assert done.parsed_arguments == whole.message.tool_calls[0].function.parsed_arguments


def test_streamed_response(served: Served) -> None:
    with served.openai() as client:
        options = {"include_usage": True}
        with client.chat.completions.stream(**ASKED, response_format=Place, stream_options=options) as stream:
            events = list(stream)
            final = stream.get_final_completion()
        [whole] = client.chat.completions.parse(**ASKED, response_format=Place).choices
    assert (
        isinstance(final.choices[0].message.parsed, Place) and final.choices[0].message.parsed == whole.message.parsed
    )
    assert "".join(event.delta for event in events if event.type == "content.delta") == whole.message.content
    assert final.usage.completion_tokens > 0


def test_an_agent_of_five_turns(served: Served) -> None:
    """Tools as an MCP server lists them, results as it returns them. Each turn is sent back; then it answers."""
    listed = [
        {"name": "files__list", "description": "list a folder", "inputSchema": {"type": "object", "properties": {}}},
        {"name": "places-look", "description": "look", "inputSchema": Place.model_json_schema()},
    ]
    listed[0]["inputSchema"]["additionalProperties"] = False  # type: ignore[index]
    tools = [
        {
            "type": "function",
            "function": {"name": one["name"], "description": one["description"], "parameters": one["inputSchema"]},
        }
        for one in listed
    ]
    messages: list[Any] = [{"role": "system", "content": "Use tools."}, *ASKED["messages"]]
    with served.openai() as client:
        for turn in range(5):
            settings = {**ASKED, "messages": messages, "tools": tools, "tool_choice": "required", "seed": turn}
            with client.chat.completions.stream(**settings, parallel_tool_calls=False) as stream:
                message = stream.get_final_completion().choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            [call] = message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert arguments == {} if call.function.name == "files__list" else Place(**arguments)
            content = [{"type": "text", "text": f"turn {turn}"}]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        settings = {**ASKED, "messages": messages}
        [last] = client.chat.completions.parse(**settings, response_format=Place).choices
    assert isinstance(last.message.parsed, Place) and len(messages) == 12
