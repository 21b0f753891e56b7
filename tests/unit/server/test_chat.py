"""/v1/chat/completions through the real client."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from support.doubles.server import Served, offline, serving

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "def f(x):"}]
RENDERED = "<|system|>be brief\n<|user|>def f(x):\n<|assistant|>"


def test_answers_through_the_template(served: Served) -> None:
    [expected] = offline([RENDERED], temperature=0, max_tokens=20)
    with served.openai() as client:
        settings = {"model": "built-in", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20}
        whole = client.chat.completions.create(**settings)
        events = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.content == expected.text and whole.choices[0].message.role == "assistant"
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == expected.text
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    assert events[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert events[-2].choices[0].finish_reason == "length"


def test_parts_tools_and_going_on(served: Served) -> None:
    """Content in parts is text; tools reach the template; a last message can be continued."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "def f(x):"}]}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    rendered = ["<|user|>def f(x):\n<|assistant|>", "<|user|>def f(x):\ntools: look\n<|assistant|>"]
    expected = [one.text for one in offline(rendered, temperature=0, max_tokens=12)]
    with served.openai() as client:
        settings = {"model": "built-in", "messages": parts, "temperature": 0, "max_tokens": 12}
        plain = client.chat.completions.create(**settings)
        tools = client.chat.completions.create(**settings, tools=[tool])
        unused = client.chat.completions.create(**settings, tools=[tool], tool_choice="none")
    assert [answer.choices[0].message.content for answer in (plain, tools)] == expected
    assert unused.choices[0].message.content == expected[0]


def test_logprobs(served: Served) -> None:
    [expected] = offline([RENDERED], temperature=0, max_tokens=6, logprobs=2)
    with served.openai() as client:
        settings = {"model": "built-in", "messages": MESSAGES, "temperature": 0, "max_tokens": 6}
        answer = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
        bare = client.chat.completions.create(**settings, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert expected.logprobs is not None
    chosen = [entry[token].logprob for entry, token in zip(expected.logprobs, expected.token_ids)]
    assert [one.logprob for one in content] == pytest.approx(chosen, abs=1e-5)
    assert "".join(one.token for one in content) == answer.choices[0].message.content
    assert [len(one.top_logprobs) for one in content] == [2] * 6
    assert bytes(content[0].bytes).decode() == content[0].token
    assert [one.top_logprobs for one in bare.choices[0].logprobs.content] == [[]] * 6


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"extra_body": {"continue_final_message": True, "add_generation_prompt": True}}, "continue_final_message"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}}, "variable"),
        ({"extra_body": {"chat_template_kwargs": {"messages": 1}}}, "template"),
    ],
    ids=str,
)
def test_refusals(served: Served, settings: dict[str, object], word: str) -> None:
    with served.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "built-in", "messages": MESSAGES, **settings})
    assert word in str(caught.value)


def test_the_demo_answers_chat_clients(tmp_path: Path) -> None:
    """The built-in model as `stride serve` serves it, without an operator's template, its drafting tried before."""
    prompt = "# be brief\n\ndef f(x):"
    [expected] = offline([prompt], temperature=0, max_tokens=12)
    with serving(tmp_path, "--check-drafting", template=False) as plain, plain.openai() as client:
        settings = {"model": "built-in", "temperature": 0, "max_tokens": 12}
        answer = client.chat.completions.create(messages=MESSAGES, **settings)
        parts = [MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": "def f(x):"}]}]
        again = client.chat.completions.create(messages=parts, **settings)
        with plain.http() as http:
            assert "<html" in http.get("/").text
    assert answer.choices[0].message.content == again.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == again.usage.prompt_tokens
