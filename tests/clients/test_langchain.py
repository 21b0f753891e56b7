"""LangChain's ChatOpenAI."""

from __future__ import annotations

from typing import Any

import pytest

from clients.asked import QUESTION, SAMPLING, Place, client_library
from support.doubles.server import Served

langchain_openai = client_library("langchain_openai")


def model(served: Served, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{served.url}/v1", api_key="none", model="built-in", max_retries=0, **{**SAMPLING, **options}
    )


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_structured_output(served: Served, method: str, strict: bool | None, responses: bool) -> None:
    options = {"use_responses_api": True, "seed": None} if responses else {}
    structured = model(served, **options).with_structured_output(Place, method=method, strict=strict)
    assert isinstance(structured.invoke(QUESTION), Place)


def test_structured_output_streamed(served: Served) -> None:
    *_, last = model(served).with_structured_output(Place, method="json_schema").stream(QUESTION)
    assert isinstance(last, Place)


def test_a_stream_of_calls_adds_up(served: Served) -> None:
    bound = model(served, stream_usage=True).bind_tools([Place], tool_choice="any", parallel_tool_calls=False)
    whole, together = bound.invoke(QUESTION), None
    for chunk in bound.stream(QUESTION):
        together = chunk if together is None else together + chunk
    assert together is not None
    assert [call["args"] for call in together.tool_calls] == [call["args"] for call in whole.tool_calls] != []
    assert not together.invalid_tool_calls and together.usage_metadata["output_tokens"] > 0


def test_a_loop_of_five_turns(served: Served) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def go(side: str) -> str:
        """Go there."""
        return f"went {side}"

    go.args_schema = Place  # bounded
    messages: list[Any] = [SystemMessage("Use tools."), HumanMessage(QUESTION)]
    for turn in range(5):
        bound = model(served, seed=turn).bind_tools([go], tool_choice="any", parallel_tool_calls=False)
        answer = bound.invoke(messages)
        assert isinstance(answer, AIMessage)
        [call] = answer.tool_calls
        assert call["name"] == "go" and Place(**call["args"])
        messages += [answer, ToolMessage(f"went {call['args']['side']}", tool_call_id=call["id"])]
    assert len(messages) == 12
