"""pydantic-ai's agents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from clients.asked import QUESTION, SAMPLING, Place, client_library
from support.doubles.server import Served

pydantic_ai = client_library("pydantic_ai")


def agent(served: Served, output: Any, api: str = "OpenAIChatModel", **options: Any) -> Any:
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{served.url}/v1", api_key="none")
    model = getattr(openai, api)("built-in", provider=provider)
    return pydantic_ai.Agent(model, output_type=output, model_settings=SAMPLING, retries=0, **options)


@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("way", ["ToolOutput", "NativeOutput"])
def test_output(served: Served, way: str, api: str) -> None:
    result = agent(served, getattr(pydantic_ai, way)(Place), api).run_sync(QUESTION)
    assert isinstance(result.output, Place) and result.usage.output_tokens > 0


def test_output_streamed(served: Served) -> None:
    async def stream() -> Any:
        async with agent(served, pydantic_ai.NativeOutput(Place)).run_stream(QUESTION) as result:
            return await result.get_output()

    assert isinstance(asyncio.run(stream()), Place)


@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_an_agent_of_five_turns(served: Served, api: str) -> None:
    """It is offered the tool alone, then its output alone."""
    seen: list[str] = []

    def look(place: Place) -> str:
        """Look there."""
        seen.append(place.side)
        return f"nothing on the {place.side}"

    async def first_four(context: Any, tools: list[Any]) -> list[Any]:
        return tools if context.run_step <= 4 else []

    async def the_fifth(context: Any, tools: list[Any]) -> list[Any]:
        return tools if context.run_step > 4 else []

    from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools

    offered = [PrepareTools(first_four), PrepareOutputTools(the_fifth)]
    runner = agent(served, pydantic_ai.ToolOutput(Place), api, tools=[look], capabilities=offered)
    result = runner.run_sync(QUESTION, model_settings={"parallel_tool_calls": False})
    assert isinstance(result.output, Place)
    assert len(seen) == 4 and result.usage.requests == 5
