"""Conversations in OpenAI's form become what the makers of each model render, with their own templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from stridelm.builtin import builtin_path
from stridelm.chat import model_chat
from stridelm.chat.model_chat import ModelChat
from stridelm.chat.parser import MessageParser
from stridelm.chat.parts import Text
from stridelm.chat.template import habits_of
from stridelm.text.tokenizer import Tokenizer
from support.checks.messages import TOOLS
from support.oracles.published import FAMILIES, published

ARGUMENTS = {"city": 'Zürich "Süd"', "count": 3}
CALLERS = {"qwen3": "hermes", "qwen2_5": "hermes", "deepseek_v3": "deepseek_v3", "llama3_2": "llama3_json"} | {
    "mistral_nemo": "mistral"
}
"""Families whose template has calls."""
SHORT = "a1b2c3d4e"
NATIVE: dict[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "deepseek_v3": lambda turns: [_native(one, arguments=json.dumps, content=None) for one in turns],
    "mistral_nemo": lambda turns: [_native(one, id=SHORT) for one in turns],
}


def _native(turn: dict[str, Any], arguments: Any = None, content: Any = "", id: str | None = None) -> dict[str, Any]:
    """A message as this family's makers write it."""
    turn = dict(turn)
    if "tool_calls" in turn:
        [call] = turn["tool_calls"]
        function = dict(call["function"])
        if arguments is not None:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        turn["tool_calls"] = [{**call, "id": id or call["id"], "function": function}]
        turn["content"] = content
    if "tool_call_id" in turn and id is not None:
        turn["tool_call_id"] = id
    return turn


def turns(call_id: str) -> list[dict[str, Any]]:
    """Two turns with a call between, with arguments as an object."""
    call = {"id": call_id, "type": "function", "function": {"name": "find", "arguments": ARGUMENTS}}
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": "find", "content": "There."},
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_formats_are_told_by_the_template(family: str) -> None:
    chat = ModelChat(published(family))
    assert chat.tool_name == CALLERS.get(family)
    assert chat.reasoning_name == ("think" if family == "qwen3" else None)
    assert (chat.tool_name or "none") in chat.description


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_conversations(family: str) -> None:
    """Content as text, in parts, and with null fields beside it is the same; a developer is the system, where there is
    no such role."""
    tokenizer = published(family)
    habits = habits_of(tokenizer)
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One\nTwo"},
        {"role": "assistant", "content": "Three"},
        {"role": "user", "content": "Four"},
    ]
    expected = tokenizer.render_chat(plain)
    parts = [
        {**one, "content": [{"type": "text", "text": line} for line in one["content"].split("\n")], "name": None}
        for one in plain
    ]
    parts[0]["role"] = "developer"
    parts[2] |= {"tool_calls": None, "refusal": None, "annotations": None, "function_call": None}
    assert tokenizer.render_chat(habits.messages(parts)) == expected
    parts[2]["tool_calls"] = []
    assert tokenizer.render_chat(habits.messages(parts)) == expected


@pytest.mark.parametrize("family", sorted(CALLERS))
def test_a_call_comes_back_as_it_was_said(family: str) -> None:
    """A turn with a call, as the family's template writes it: found by the parser, sent back in OpenAI's form, rendered
    to the same ids as its makers' own form."""
    tokenizer = published(family)
    chat = ModelChat(tokenizer)
    native = NATIVE.get(family, lambda given: given)(turns("call_0123456789"))
    rendered = tokenizer.render_chat(native, TOOLS if chat.habits.reads_tools else None, False)
    before = tokenizer.render_chat(native[:1], TOOLS if chat.habits.reads_tools else None, True)
    said = rendered.removeprefix(before) if rendered.startswith(before) else rendered.partition("Where?")[2]
    for end in ("<|im_end|>", "<|eot_id|>", "</s>", "<｜tool▁outputs▁begin｜>", "<｜end▁of▁sentence｜>"):
        said = said.partition(end)[0]
    parser = MessageParser(chat.form, "", TOOLS)
    parts = parser.feed([said]) + parser.finish()
    calls = [part for part in parts if not isinstance(part, Text)]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("find", ARGUMENTS)], said
    [call] = calls
    sent: list[dict[str, Any]] = [
        {"role": "user", "content": "Where?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "name": "find", "content": [{"type": "text", "text": "There."}]},
    ]
    again = tokenizer.render_chat(chat.habits.messages(sent), TOOLS if chat.habits.reads_tools else None, False)
    assert again.replace(call.id, SHORT) == rendered


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "mistral_nemo"])
def test_what_the_prompt_has_of_the_message(family: str) -> None:
    tokenizer = published(family)
    chat = ModelChat(tokenizer)
    words = [{"role": "user", "content": "What is <think>?" * 200}]
    assert chat.opened(tokenizer.apply_chat_template(words)) == ""
    if family == "qwen3":
        text = tokenizer.render_chat(words, variables={"enable_thinking": False})
        assert chat.opened(tokenizer.encode(text, False)) == "<think>\n\n</think>\n\n"
    going_on = [*words, {"role": "assistant", "content": "So " * 300}]
    text = tokenizer.render_chat(going_on, None, False, True)
    assert chat.opened(tokenizer.encode(text, False)).removeprefix("<think>\n\n</think>\n\n").split() == ["So"] * 300


def test_special_tokens_of_the_format_are_kept() -> None:
    """Those that are marks of calls, and no others."""
    chat = ModelChat(published("mistral_nemo"))
    kept = {chat.tokenizer.token_text(token) for token in chat.kept}
    assert "[TOOL_CALLS]" in kept and not kept & {"</s>", "<s>", "[INST]"}


def test_options() -> None:
    tokenizer = Tokenizer.load(builtin_path())
    assert "tool calls: none, reasoning: none" in ModelChat(tokenizer).description
    assert "tool calls: hermes, reasoning: qwen3 (by options)" in ModelChat(tokenizer, "hermes", "qwen3").description
    with pytest.raises(ValueError, match=r"tool_call_parser 'no'.*hermes"):
        ModelChat(tokenizer, "no")
    with pytest.raises(ValueError, match=r"reasoning_parser 'no'.*qwen3"):
        ModelChat(tokenizer, reasoning_parser="no")


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "only text"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "JSON object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "JSON object"),
    ],
)
def test_messages_that_cannot_be_read(message: dict[str, Any], word: str) -> None:
    habits = habits_of(published("qwen3"))
    with pytest.raises(ValueError, match=word):
        habits.messages([message])


def test_a_template_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found when the server starts: no request could be answered."""
    tokenizer = Tokenizer.load(builtin_path())
    tokenizer.hf.chat_template = "{% for _ in range(99999) %}{% for _ in range(99) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(model_chat, "RENDERING_S", 0.1)
    with pytest.raises(ValueError, match=r"does not end within 0.1 s"):
        ModelChat(tokenizer)
