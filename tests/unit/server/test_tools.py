"""Tool calls and reasoning over HTTP, as OpenAI's clients expect them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.doubles.server import CHATML, Served, serving, settle

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "look at a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 6}, "count": {"type": "integer", "maximum": 99}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "additionalProperties": False}
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop", "parameters": NOTHING}}
GO: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {**NOTHING, "properties": {"to": {"enum": ["a", "b"]}}, "required": ["to"]},
    },
}
ASKED: dict[str, Any] = {
    "model": "built-in",
    "messages": [{"role": "user", "content": "Where is it?"}],
    "tools": [LOOK, STOP],
    "max_tokens": 80,
    "temperature": 0.8,
    "seed": 5,
}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose template opens the reasoning."""
    directory = tmp_path_factory.mktemp("thinking")
    template = directory / "thinking.jinja"
    template.write_text(CHATML.replace("<|assistant|>", "<|assistant|><think>\n"), encoding="utf-8")
    options = ("--chat-template", str(template), "--reasoning-parser", "qwen3")
    with serving(directory, *options, template=False) as served:
        yield served
        settle(served)
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [(one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls or []]


def streamed(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The message of a stream, put together as clients do."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    for event in events:
        for choice in event.choices:
            if choice.index != index:
                continue
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                known = found["calls"].setdefault(call.index, {"name": "", "arguments": "", "id": call.id})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
            found["finish"] = choice.finish_reason or found["finish"]
    return found


@pytest.mark.parametrize("speculation", ["off", "mtp", "ngram", "mask"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=["any", "one"])
def test_a_forced_call(served: Served, choice: Any, speculation: str) -> None:
    """The same with every drafter, whole and streamed: arguments by their schema, ids, indices and the reason."""
    settings = {**ASKED, "tool_choice": choice, "n": 2, "extra_body": {"speculation": speculation}}
    settings |= {"parallel_tool_calls": False, "max_tokens": 120}
    with served.openai() as client:
        whole = client.chat.completions.create(**settings)
        plain = client.chat.completions.create(**{**settings, "extra_body": {"speculation": "off"}})
        events = list(client.chat.completions.create(**settings, stream=True))
    for one, other in zip(whole.choices, plain.choices, strict=True):
        assert calls_of(one) == calls_of(other) != []
        assert one.finish_reason == "tool_calls" and one.message.content is None
        message = streamed(events, one.index)
        assert [(call["name"], json.loads(call["arguments"])) for call in message["calls"].values()] == calls_of(one)
        assert list(message["calls"]) == list(range(len(message["calls"]))) and message["finish"] == "tool_calls"
        assert message["content"] == ""
        ids = {call.id for call in one.message.tool_calls} | {call["id"] for call in message["calls"].values()}
        assert len(ids) == 2 * len(calls_of(one)) and all(id.startswith("call_") for id in ids)
        if choice != "required":
            [(name, arguments)] = calls_of(one)
            assert name == "look" and len(arguments["place"]) <= 6


def test_what_is_cut_is_text(served: Served) -> None:
    """A call that max_tokens cuts is content, whole or streamed, with that reason."""
    settings = {**ASKED, "tool_choice": "required", "max_tokens": 12}
    with served.openai() as client:
        [whole] = client.chat.completions.create(**settings).choices
        message = streamed(list(client.chat.completions.create(**settings, stream=True)))
    assert whole.finish_reason == message["finish"] == "length" and not whole.message.tool_calls
    assert whole.message.content == message["content"] and whole.message.content.startswith("<tool_call>")


def test_parallel_calls_can_be_forbidden(served: Served) -> None:
    with served.openai() as client:
        for seed in range(4):
            settings = {**ASKED, "seed": seed, "tools": [STOP], "tool_choice": "required", "max_tokens": 200}
            [one] = client.chat.completions.create(**settings, parallel_tool_calls=False).choices
            assert calls_of(one) == [("stop", {})]


def test_tools_that_may_be_called(served: Served) -> None:
    """Under `auto` text is text. With a subset, only its tools are called."""
    with served.openai() as client:
        [free] = client.chat.completions.create(**ASKED).choices
        [none] = client.chat.completions.create(**ASKED, tool_choice="none").choices
        subset = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": subset}
        [some] = client.chat.completions.create(**{**ASKED, "max_tokens": 200}, tool_choice=choice).choices
    assert free.message.content and none.message.content
    assert {name for name, _ in calls_of(some)} == {"stop"}


def test_a_loop_of_five_turns(served: Served) -> None:
    """An agent's conversation, each turn sent back in OpenAI's own form; in the end it answers in JSON."""
    messages: list[Any] = [{"role": "developer", "content": "Use tools."}, *ASKED["messages"]]
    with served.openai() as client:
        for turn in range(5):
            settings = {**ASKED, "tools": [GO], "messages": messages, "tool_choice": "required", "seed": turn}
            [choice] = client.chat.completions.create(**settings, parallel_tool_calls=False).choices
            messages.append(choice.message)  # the client's own object, with its null fields
            for call in choice.message.tool_calls:
                part = {"type": "text", "text": f"{turn} there"}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": [part]})
        form = {"type": "json_schema", "json_schema": {"name": "end", "schema": NOTHING}}
        settings = {**ASKED, "tools": [GO], "messages": messages, "response_format": form}
        [last] = client.chat.completions.create(**settings).choices
    assert {json.loads(one.tool_calls[0].function.arguments)["to"] for one in messages[2::2]} <= {"a", "b"}
    assert last.message.content.strip() == "{}" if last.finish_reason == "stop" else calls_of(last)


def test_reasoning(thinking: Served) -> None:
    """Separate from the content, streamed or not, counted, and left out if asked. The model is made to write hardly
    anything but parts of the mark that ends it."""
    with thinking.http() as client:
        ids = client.post("/tokenize", json={"prompt": "</think> so"}).json()["tokens"]
    settings = {**ASKED, "tools": [], "logit_bias": dict.fromkeys(map(str, ids), 60), "n": 8, "max_tokens": 60}
    with thinking.openai() as client:
        joined = client.chat.completions.create(**settings, extra_body={"separate_reasoning": False})
        whole = client.chat.completions.create(**settings)
        events = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
        hidden = client.chat.completions.create(**settings, extra_body={"include_reasoning": False})
    both = 0
    for raw, choice, without in zip(joined.choices, whole.choices, hidden.choices, strict=True):
        before, mark, after = raw.message.content.partition("</think>")
        found = streamed(events, choice.index)
        reasoning = getattr(choice.message, "reasoning_content", "")
        assert (reasoning, choice.message.content) == (found["reasoning"], found["content"])
        assert reasoning == (before.strip() if mark else before.lstrip())
        assert choice.message.content == without.message.content == after.lstrip()
        assert not hasattr(without.message, "reasoning_content")
        both += bool(reasoning and choice.message.content)
    assert both
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    assert 0 < counted < whole.usage.completion_tokens
    assert events[-1].usage.completion_tokens_details.reasoning_tokens == counted


def test_a_structured_answer_after_reasoning(thinking: Served) -> None:
    """The schema binds what follows the reasoning."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": NOTHING}}
    with thinking.http() as client:
        ids = client.post("/tokenize", json={"prompt": "</think>"}).json()["tokens"]
    settings = {**ASKED, "tools": [], "logit_bias": dict.fromkeys(map(str, ids), 60), "n": 8, "max_tokens": 80}
    with thinking.openai() as client:
        answers = client.chat.completions.create(**settings, response_format=form).choices
    ended = [choice for choice in answers if choice.finish_reason == "stop"]
    assert ended and all(json.loads(choice.message.content) == {} for choice in ended)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"tool_choice": "required", "tools": []}, "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "lose"}}}, "lose"),
        ({"tools": [{"type": "web_search"}]}, "function"),
        ({"tools": [LOOK, LOOK]}, "same name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "object"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "no effect"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "function"),
    ],
    ids=str,
)
def test_refusals(served: Served, given: dict[str, Any], word: str) -> None:
    with served.http() as client:
        answer = client.post("/v1/chat/completions", json={**ASKED, **given})
    assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text


def test_a_schema_that_cannot_be_held_is_named(served: Served) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with served.http() as client:
        answer = client.post("/v1/chat/completions", json={**ASKED, "tools": [tool], "tool_choice": "required"})
        free = client.post("/v1/chat/completions", json={**ASKED, "tools": [tool], "max_tokens": 2})
    assert answer.status_code == 400 and "uniqueItems" in answer.json()["error"]["message"]
    assert free.status_code == 200


def test_a_model_whose_calls_are_not_known(tmp_path: Any) -> None:
    """Tools are refused by name, and the server says at its start what it reads of messages."""
    with serving(tmp_path, template=False) as served:
        with served.http() as client:
            answer = client.post("/v1/chat/completions", json=ASKED)
            large = client.post("/v1/chat/completions", json={**ASKED, "messages": ASKED["messages"] * 3000})
        assert served.stop() == 0
        assert "tool calls: none, reasoning: none" in served.log.read_text(encoding="utf-8")
    assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["error"]["message"]
    assert large.status_code == 400


def test_a_large_body(served: Served) -> None:
    """Read by a worker: the tools are there all the same."""
    tool = {**LOOK, "function": {**LOOK["function"], "description": "d" * 300_000}}
    with served.openai() as client:
        settings = {**ASKED, "tool_choice": "required"}
        [small] = client.chat.completions.create(**settings).choices
        [large] = client.chat.completions.create(**{**settings, "tools": [tool, STOP]}).choices
    assert calls_of(small) == calls_of(large) != []
