"""Anthropic's Messages API through its own client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stridelm.builtin import builtin_path
from stridelm.server.anthropic.schemas import MessagesRequest
from stridelm.server.errors import ApiError
from stridelm.server.large import SMALL_BODY
from stridelm.server.openai.conversation import conversation_text
from stridelm.text.tokenizer import Tokenizer
from support.doubles.server import Served, offline

anthropic = pytest.importorskip("anthropic")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 6}},
    "required": ["place"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "additionalProperties": False}
LOOK: dict[str, Any] = {"name": "look", "description": "look at it", "input_schema": SCHEMA}
STOP: dict[str, Any] = {"name": "stop", "input_schema": NOTHING, "strict": True, "cache_control": {"type": "ephemeral"}}
QUESTION = [{"role": "user", "content": "def f(x):"}]
ASKED: dict[str, Any] = {"model": "built-in", "messages": QUESTION, "max_tokens": 20}
CALLING: dict[str, Any] = {
    **ASKED,
    "tools": [LOOK, STOP],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "max_tokens": 120,
}
GREEDY = {"temperature": 0}
"""The client has no parameter for it any more."""
RENDERED = "<|system|>be brief\n<|user|>def f(x):\n<|assistant|>"
LEAST: dict[str, Any] = {"messages": QUESTION, "max_tokens": 1}


def client_of(served: Served) -> Any:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60)


def told(message: Any) -> dict[str, Any]:
    """A message without what is its own: ids, and how much of the prompt was cached."""
    fields = json.loads(message.to_json(exclude_unset=False))
    blocks = [{**block, "id": None, "parsed_output": None} for block in fields["content"]]
    return {
        **{name: fields[name] for name in ("type", "role", "model", "stop_reason", "stop_sequence")},
        "blocks": blocks,
    }


def test_text(served: Served) -> None:
    """What the offline API says of the same conversation, whether the system's message is a text or blocks."""
    [expected] = offline([RENDERED], temperature=0, max_tokens=20)
    blocks = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    with client_of(served) as client:
        one = client.messages.create(**ASKED, system="be brief", extra_body=GREEDY)
        same = client.messages.create(**ASKED, system=blocks, extra_body=GREEDY, metadata={"user_id": "u"})
        count = client.messages.count_tokens(model="built-in", messages=QUESTION, system="be brief")
    assert one.content[0].text == same.content[0].text == expected.text
    assert (one.type, one.role, one.model, one.stop_reason) == ("message", "assistant", "built-in", "max_tokens")
    assert one.id.startswith("msg_") and one.usage.output_tokens == 20 and one.usage.cache_creation_input_tokens == 0
    assert same.usage.cache_read_input_tokens > 0
    for usage in (one.usage, same.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens


@pytest.mark.parametrize("asked", [ASKED, CALLING], ids=["text", "a call"])
@pytest.mark.parametrize("speculation", ["off", "mtp", "ngram"])
def test_streams(served: Served, asked: dict[str, Any], speculation: str) -> None:
    """The events build the whole answer, in Anthropic's order, whatever drafts."""
    more = {"extra_body": {**GREEDY, "speculation": speculation}}
    with client_of(served) as client:
        plain = client.messages.create(**asked, extra_body={**GREEDY, "speculation": "off"})
        with client.messages.stream(**asked, **more) as stream:
            built = stream.get_final_message()
        raw = list(client.messages.create(**asked, **more, stream=True))
    assert told(plain) == told(built)
    kinds = [event.type for event in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    [block] = built.content
    if asked is ASKED:
        assert "".join(event.delta.text for event in raw[2:-3]) == block.text and len(raw) > 6
    else:
        assert block.type == "tool_use" and json.loads(raw[2].delta.partial_json) == block.input
        assert raw[-2].delta.stop_reason == "tool_use" and built.stop_reason == "tool_use"
    start = raw[0].message.usage
    assert start.output_tokens == 0 and raw[-2].usage.output_tokens == plain.usage.output_tokens
    assert start.input_tokens + start.cache_read_input_tokens == plain.usage.input_tokens + (
        plain.usage.cache_read_input_tokens
    )


def test_event_lines(served: Served) -> None:
    """Each event is named twice, the second is a ping, and nothing follows the last."""
    with served.http() as client:
        text = client.post("/v1/messages", json={**ASKED, "stream": True}).text
    names = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        names.append(json.loads(data.removeprefix("data: "))["type"])
        assert name == f"event: {names[-1]}"
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"


def test_a_loop_of_two_turns(served: Served) -> None:
    """Answers come back as the client's own objects, with the results of their calls."""
    messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
    with client_of(served) as client:
        for turn in range(2):
            settings = {**CALLING, "messages": messages}
            answer = client.messages.create(**settings, extra_body={"temperature": 0.8, "seed": turn})
            [call] = answer.content
            assert answer.stop_reason == "tool_use" and call.name in ("look", "stop")
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "there", "is_error": bool(turn)}
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(**{**CALLING, "messages": messages, "tool_choice": {"type": "none"}})
        named = client.messages.create(**{**CALLING, "tool_choice": {"type": "tool", "name": "stop"}})
    assert [block.type for block in last.content] == ["text"] and named.content[0].name == "stop"


def test_stop_reasons(served: Served) -> None:
    """A stop sequence, the end of a turn, max_tokens, and a full context."""
    with client_of(served) as client:
        text = client.messages.create(**ASKED, extra_body=GREEDY).content[0].text
        word = text[len(text) // 2 :][:3]
        stopped = client.messages.create(**ASKED, stop_sequences=["never", word], extra_body=GREEDY)
        form = {"type": "json_schema", "schema": NOTHING}
        ended = client.messages.create(**ASKED, output_config={"format": form})
        older = client.messages.create(**ASKED, extra_body={"output_format": form})
        long = {**ASKED, "max_tokens": 4000}
        full = client.messages.create(**long, extra_body={**GREEDY, "ignore_eos": True, "speculation": "ngram"})
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == text.partition(word)[0]
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    assert json.loads(ended.content[0].text) == json.loads(older.content[0].text) == {}
    assert full.stop_reason == "model_context_window_exceeded"


def test_the_conversation_of_blocks() -> None:
    """Thinking, text and calls are one message, results are messages of their own, and a last message of the
    assistant's is continued."""
    tokenizer = Tokenizer.load(builtin_path())
    tokenizer.hf.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.reasoning_content or '' }}|"
        "{{ message.content }}|{% for call in message.tool_calls or [] %}{{ call.function.name }}"
        "{{ call.function.arguments | tojson }}{% endfor %}{{ message.name or '' }}{% endfor %}"
        "{{ enable_thinking if enable_thinking is defined else '' }}{{ reasoning_effort or '' }}"
    )
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {"place": "a"}, **cached}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "where", **cached}, {"type": "text", "text": "is it"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "so", "citations": None},
                call,
                {**call, "id": "2", "name": "stop", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "lost"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "2"},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}}
    body = {**LEAST, "messages": messages, "tools": [LOOK], "system": [{"type": "text", "text": "one"}], **cached}
    expected = (
        '<system>|one|<user>|where\nis it|<assistant>hm|so|look{"place": "a"}stop{}'
        "<tool>|The tool failed:\nlost|look<tool>||stop<user>|go on|"
    )

    def rendered(**more: Any) -> str:
        return conversation_text(MessagesRequest.model_validate({**body, **more}).as_chat(), tokenizer)

    assert rendered() == rendered(thinking={"type": "adaptive"}) == expected
    assert rendered(**more) == f"{expected}Truexhigh"
    assert rendered(thinking={"type": "disabled"}) == f"{expected}False"
    assert rendered(messages=[*messages, {"role": "assistant", "content": "It is"}]).endswith("<assistant>|It is")


def test_a_rendered_prompt(served: Served) -> None:
    """The same as that of the chat, and as many tokens as are counted."""
    with served.http() as client:
        ours = client.post("/v1/messages/render", json=LEAST).json()
        chat = client.post("/v1/chat/completions/render", json=LEAST).json()
        count = client.post("/v1/messages/count_tokens", json={"messages": QUESTION}).json()
    for field in ("token_ids", "sampling_params"):
        assert ours[field] == chat[field]
    assert count == {"input_tokens": len(ours["token_ids"])}


def test_a_prefilled_answer(served: Served) -> None:
    [expected] = offline(["<|user|>def f(x):\n<|assistant|>    return"], temperature=0, max_tokens=20)
    messages = [*QUESTION, {"role": "assistant", "content": "    return"}]
    with client_of(served) as client:
        answer = client.messages.create(**{**ASKED, "messages": messages}, extra_body=GREEDY)
    assert answer.content[0].text == expected.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({name: "x"}, name) for name in MessagesRequest.refused if name not in MessagesRequest.model_fields
]
REFUSED += [
    ({"n": 2}, "n"),
    ({"stop": "x"}, "stop_sequences"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"model": "claude"}, "claude"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}, "results"),
    ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "thinking"),
    ({"system": [{"type": "image"}]}, "image"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
    ({"tools": [LOOK, LOOK]}, "same name"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "name"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "lose"}}, "lose"),
    ({"tool_choice": {"type": "any"}}, "no tools"),
    ({"thinking": {"type": "between_tools"}}, "thinking"),
    ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "json_schema"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
]


@pytest.mark.parametrize(("given", "word"), REFUSED, ids=str)
def test_refusals(served: Served, given: dict[str, Any], word: str) -> None:
    """By name, in Anthropic's form, whether or not the body is large."""
    with served.http() as client:
        for size in (0, SMALL_BODY):
            body = json.dumps({**LEAST, **given}) + " " * size
            answer = client.post("/v1/messages", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == (404 if "model" in given else 400), answer.text
            error = answer.json()
            kind = "not_found_error" if "model" in given else "invalid_request_error"
            assert error["type"] == "error" and set(error["error"]) == {"type", "message"}
            assert error["error"]["type"] == kind and word in error["error"]["message"]


@pytest.mark.parametrize("name", MessagesRequest.refused)
def test_every_row_is_heeded(name: str) -> None:
    plain = MessagesRequest.model_validate(LEAST)
    for value in (None, *MessagesRequest.refused[name][1:]):
        assert MessagesRequest.model_validate({**LEAST, name: value}) == plain
    with pytest.raises(ApiError, match=f"{name}: "):
        MessagesRequest.model_validate({**LEAST, name: "other"})


def test_errors_of_the_client(served: Served) -> None:
    """Its own classes, and the form also where no route is."""
    with client_of(served) as client:
        with pytest.raises(anthropic.BadRequestError, match="no tools"):
            client.messages.create(**ASKED, tool_choice={"type": "any"})
        with pytest.raises(anthropic.NotFoundError, match="no model"):
            client.messages.create(**{**ASKED, "model": "claude"})
    with served.http() as http:
        for method, path in (("GET", "/v1/messages"), ("POST", "/v1/messages/batches")):
            answer = http.request(method, path)
            assert answer.json()["type"] == "error" and answer.status_code in (404, 405)


def test_what_agents_send(served: Served) -> None:
    """Headers, hints and bookkeeping change nothing."""
    more: dict[str, Any] = {"service_tier": "auto", "thinking": {"type": "enabled", "budget_tokens": 4096}}
    more |= {"metadata": {"user_id": "u" * 600}, "cache_control": {"type": "ephemeral"}, "tools": []}
    keep = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    headers = {"anthropic-beta": "interleaved-thinking-2025-05-14,context-management-2025-06-27"}
    with client_of(served) as client:
        plain = client.messages.create(**ASKED, extra_body=GREEDY)
        other = client.messages.create(**ASKED, **more, extra_body={**GREEDY, **keep}, extra_headers=headers)
    assert told(plain) == told(other)


def test_a_large_body(served: Served) -> None:
    """Read by a worker: counted alike, and the tools are there all the same."""
    tool = {**LOOK, "description": "d" * 300_000}
    text = [{"role": "user", "content": "x = 1\n" * 20_000}]
    with client_of(served) as client:
        small, large = (
            client.messages.create(**{**CALLING, "tools": [one, STOP]}, extra_body=GREEDY) for one in (LOOK, tool)
        )
        count = client.messages.count_tokens(model="built-in", messages=text, tools=[LOOK], tool_choice={"type": "any"})
        with pytest.raises(anthropic.BadRequestError, match="tokens"):
            client.messages.create(**{**ASKED, "messages": text})
    assert told(small) == told(large) and count.input_tokens > 60_000
