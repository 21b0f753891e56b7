"""OpenAI's Responses API through its own client."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from stridelm.builtin import builtin_path
from stridelm.server.errors import ApiError
from stridelm.server.large import SMALL_BODY
from stridelm.server.openai.conversation import conversation_text
from stridelm.server.responses.schemas import ResponsesRequest
from stridelm.text.tokenizer import Tokenizer
from support.doubles.server import Served, offline

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 6}},
    "required": ["place"],
    "additionalProperties": False,
}
LOOK: dict[str, Any] = {"type": "function", "name": "look", "description": "look at it", "parameters": PARAMETERS}
NOTHING: dict[str, Any] = {"type": "object", "additionalProperties": False}
STOP: dict[str, Any] = {"type": "function", "name": "stop", "parameters": NOTHING, "strict": True}
ASKED: dict[str, Any] = {"model": "built-in", "input": "def f(x):", "temperature": 0, "max_output_tokens": 20}
CALLING: dict[str, Any] = {
    **ASKED,
    "tools": [LOOK, STOP],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 120,
}
RENDERED = "<|system|>be brief\n<|user|>def f(x):\n<|assistant|>"
OWN = ("id", "created_at", "speculation", "usage")
"""What differs between answers to the same request: the rest of the prompt is cached the second time."""


def told(response: Any) -> dict[str, Any]:
    """A response without what is its own."""
    fields = json.loads(response.to_json(exclude_unset=False))
    items = [{**item, "id": None, "call_id": None, "parsed_arguments": None} for item in fields["output"]]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return {**{name: value for name, value in fields.items() if name not in OWN}, "output": items}


def test_text(served: Served) -> None:
    """What the offline API says of the same conversation, with the instructions as the system's message."""
    [expected] = offline([RENDERED], temperature=0, max_tokens=20)
    with served.openai() as client:
        one = client.responses.create(**ASKED, instructions="be brief")
        items = [{"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]}]
        items += [{"type": "message", "role": "user", "content": ASKED["input"]}]
        same = client.responses.create(**{**ASKED, "input": items, "metadata": {"a": "b"}, "user": "u"})
    assert one.output_text == same.output_text == expected.text
    assert (one.object, one.status, one.incomplete_details.reason) == ("response", "incomplete", "max_output_tokens")
    assert [item.type for item in one.output] == ["message"] and one.output[0].status == "incomplete"
    assert same.metadata == {"a": "b"} and same.user == "u" and one.model == "built-in"
    assert (one.usage.output_tokens, one.usage.total_tokens) == (20, one.usage.input_tokens + 20)
    assert 0 < same.usage.input_tokens_details.cached_tokens < same.usage.input_tokens == one.usage.input_tokens


@pytest.mark.parametrize("asked", [ASKED, CALLING], ids=["text", "a call"])
@pytest.mark.parametrize("speculation", ["off", "mtp", "ngram"])
def test_streams(served: Served, asked: dict[str, Any], speculation: str) -> None:
    """The last event has the whole answer, and the others build it, in OpenAI's order, whatever drafts."""
    with served.openai() as client:
        plain = client.responses.create(**asked, extra_body={"speculation": "off"})
        with client.responses.stream(**asked, extra_body={"speculation": speculation}) as stream:
            last = list(stream)[-1]
        events = list(client.responses.create(**asked, extra_body={"speculation": speculation}, stream=True))
    assert told(plain) == told(last.response) == told(events[-1].response)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    [item] = last.response.output
    if asked is ASKED:
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == item.content[0].text and len(texts) > 1
        assert kinds[3] == "content_part.added" and set(kinds[4:-4]) == {"output_text.delta"}
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    else:
        call = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"]
        assert kinds[3:] == call and events[3].delta == events[4].arguments == item.arguments
    assert {getattr(event, "item_id", None) for event in events} - {None} == {events[2].item.id}


def test_event_lines(served: Served) -> None:
    """Each event is named twice, and nothing follows the last."""
    with served.http() as client:
        text = client.post("/v1/responses", json={**ASKED, "stream": True}).text
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert name == "event: response.incomplete"


def test_a_loop_of_two_turns(served: Served) -> None:
    """Calls come back as the client's own objects, and their results as items."""
    items: list[Any] = [{"role": "user", "content": "Where is it?"}]
    with served.openai() as client:
        for turn in range(2):
            response = client.responses.create(**{**CALLING, "input": items, "temperature": 0.8, "top_p": 0.9})
            [call] = response.output
            assert response.status == "completed" and call.name in ("look", "stop")
            assert call.call_id.startswith("call_") and isinstance(json.loads(call.arguments), dict)
            output: Any = "there" if turn else [{"type": "input_text", "text": "there"}]
            items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": output}]
        last = client.responses.create(**{**CALLING, "input": items, "tool_choice": "none"})
        chosen = client.responses.create(**{**CALLING, "tool_choice": {"type": "function", "name": "stop"}})
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
        subset = client.responses.create(**{**CALLING, "tool_choice": allowed})
    assert [item.type for item in last.output] == ["message"]
    assert (chosen.output[0].name, subset.output[0].name) == ("stop", "look")
    assert chosen.tool_choice.name == "stop" and [tool.name for tool in chosen.tools] == ["look", "stop"]


def test_the_conversation_of_items() -> None:
    """Reasoning, content and calls of a turn are one message; instructions and leading ones are one, too."""
    tokenizer = Tokenizer.load(builtin_path())
    tokenizer.hf.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.reasoning_content or '' }}|"
        "{{ message.content }}|{% for call in message.tool_calls or [] %}{{ call.function.name }}"
        "{{ call.function.arguments | tojson }}{% endfor %}{{ message.name or '' }}{% endfor %}"
    )
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"place": "a"}'}
    items = [
        {"role": "system", "content": "two"},
        {"role": "user", "content": "where"},
        {**thought, "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}], "id": "msg_1"},
        call,
        {**call, "call_id": "2", "name": "stop", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": "halted"},
        {**thought, "summary": [{"type": "summary_text", "text": "short"}]},
        call,
    ]
    body = ResponsesRequest.model_validate({"input": items, "instructions": "one", "tools": [LOOK]})
    assert conversation_text(body.as_chat(), tokenizer) == (
        '<system>|one\ntwo|<user>|where|<assistant>hm|so|look{"place": "a"}stop{}<tool>|halted|stop'
        '<assistant>short||look{"place": "a"}'
    )


class Nothing(BaseModel):
    value: Literal["a", "b"]


def test_parsed_answers(served: Served) -> None:
    with served.openai() as client:
        response = client.responses.parse(**{**ASKED, "max_output_tokens": 60}, text_format=Nothing)
        free = client.responses.create(**ASKED, text={"format": {"type": "text"}, "verbosity": "low"})
    assert response.status == "completed" and response.output_parsed.value in ("a", "b")
    assert response.text.format.name == "Nothing" and free.text.verbosity == "low"


def test_log_probabilities(served: Served) -> None:
    """Chat's, in the text and in its deltas."""
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with served.openai() as client:
        chat = client.chat.completions.create(
            model="built-in",
            messages=[{"role": "user", "content": ASKED["input"]}],
            temperature=0,
            max_tokens=20,
            logprobs=True,
            top_logprobs=2,
        )
        whole = client.responses.create(**ASKED, **more)
        events = list(client.responses.create(**ASKED, **more, stream=True))
        with pytest.raises(openai.BadRequestError, match="neither calls nor reasoning"):
            client.responses.create(**CALLING, **more)
    expected = [entry.to_dict() for entry in chat.choices[0].logprobs.content]
    streamed = [entry.to_dict() for event in events if hasattr(event, "delta") for entry in event.logprobs]
    assert [entry.to_dict() for entry in whole.output[0].content[0].logprobs] == expected
    assert streamed == expected[: len(streamed)] and len(streamed) > 10
    assert [entry.to_dict() for entry in events[-1].response.output[0].content[0].logprobs] == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({name: "x"}, name) for name in ResponsesRequest.refused if name not in ResponsesRequest.model_fields
]
REFUSED += [
    ({"n": 2}, "n"),
    ({"max_tokens": 5}, "max_output_tokens"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    ({"input": [{"type": "function_call", "name": "look", "arguments": "{}"}]}, "call_id"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "look", "arguments": "{"}]}, "JSON"),
    ({"input": [{"role": "user"}]}, "text"),
    ({"input": [{"type": "reasoning", "content": 5}, {"content": "x"}]}, "role"),
    ({"tools": [{"type": "web_search"}]}, "web_search"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "name"),
    ({"tools": [LOOK], "tool_choice": {"type": "file_search"}}, "file_search"),
    ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "lose"}}, "lose"),
    ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": 5}}, "tool_choice"),
    ({"tool_choice": "required"}, "no tools"),
    ({"top_logprobs": 2}, "include"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
    ({"reasoning": {"effort": "most"}}, "effort"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"model": "gpt-9"}, "gpt-9"),
]


@pytest.mark.parametrize(("given", "word"), REFUSED, ids=str)
def test_refusals(served: Served, given: dict[str, Any], word: str) -> None:
    """By name, with what to do instead, whether or not the body is large."""
    with served.http() as client:
        for size in (0, SMALL_BODY):
            body = json.dumps({"input": "x", "max_output_tokens": 1, **given}) + " " * size
            answer = client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (400, 404), answer.text
            assert word in answer.json()["error"]["message"] and set(answer.json()) == {"error"}


@pytest.mark.parametrize("name", ResponsesRequest.refused)
def test_every_row_is_heeded(name: str) -> None:
    """Of fields that chat has, too; null and inert values ask for nothing."""
    plain = ResponsesRequest.model_validate({"input": "x"})
    instead, *inert = ResponsesRequest.refused[name]
    for value in (None, *inert):
        assert ResponsesRequest.model_validate({"input": "x", name: value}) == plain
    with pytest.raises(ApiError, match=f"{name}: "):
        ResponsesRequest.model_validate({"input": "x", name: "other"})
    assert instead


def test_what_agents_send(served: Served) -> None:
    """Hints and bookkeeping change nothing, and nothing is stored."""
    more: dict[str, Any] = {"store": True, "truncation": "disabled", "service_tier": "auto", "prompt_cache_key": "k"}
    more |= {"safety_identifier": "s", "include": ["reasoning.encrypted_content"], "background": False}
    more |= {"reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": True, "tools": []}
    with served.openai() as client:
        plain = client.responses.create(**ASKED)
        other = client.responses.create(**ASKED, **more, extra_body={"client_metadata": {"a": "b"}})
        assert other.output_text == plain.output_text and other.store is False
        assert (other.reasoning.effort, other.service_tier) == ("low", "default")
        for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="nothing is stored"):
                act(plain.id)


def test_a_large_body(served: Served) -> None:
    """Read by a worker: instructions are in the prompt, and tools are there, all the same."""
    tool = {**LOOK, "description": "d" * 300_000}
    with served.openai() as client:
        small, large = (client.responses.create(**{**CALLING, "tools": [one, STOP]}) for one in (LOOK, tool))
        assert told(small) == told(large)
        with pytest.raises(openai.BadRequestError, match="tokens"):
            client.responses.create(**ASKED, instructions="x" * 100_000)
