"""Messages are told apart into reasoning, content and calls, however they are cut, and nothing of them is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from stridelm.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from stridelm.chat.message_format import MessageFormat, published_format
from stridelm.chat.parser import MessageParser
from stridelm.chat.parts import Part, Text
from support.checks.messages import CALLS, FIRST, SECOND, TOOLS, format_of, text_before, thought

Found = tuple[str, str, list[tuple[str, str]]]
EVERY = sorted(CALLS)


def found(parts: Sequence[Part]) -> Found:
    """Reasoning, content, and names and arguments of calls."""
    texts = {"reasoning": "", "content": ""}
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, Text):
            texts[part.field] += part.text
        else:
            assert part.index == len(calls)
            calls.append((part.name, part.arguments))
    return texts["reasoning"], texts["content"], calls


def read(form: MessageFormat, pieces: Sequence[str], opened: str = "", tools: bool = True) -> Found:
    parser = MessageParser(form, opened, TOOLS if tools else None)
    return found([part for piece in pieces for part in parser.feed([piece])] + parser.finish())


def cut(text: str, draw: random.Random) -> list[str]:
    places = sorted(draw.sample(range(len(text) + 1), draw.randint(0, min(len(text), 60))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def test_every_format_has_a_message() -> None:
    assert {id(TOOL_FORMATS[name]) for name in CALLS} == set(map(id, TOOL_FORMATS.values()))


@pytest.mark.parametrize("name", EVERY)
def test_a_message(name: str) -> None:
    """Reasoning, text and calls, whole and cut at random down to single characters."""
    text, draw = thought(name) + text_before(name) + CALLS[name], random.Random(name)
    expected = ("first {this}", text_before(name).strip())
    for pieces in ([text], list(text), *(cut(text, draw) for _ in range(30))):
        reasoning, content, calls = read(format_of(name), pieces)
        assert (reasoning, content) == expected
        assert [(one, json.loads(arguments)) for one, arguments in calls] == [
            ("find", json.loads(FIRST)),
            ("find", json.loads(SECOND)),
        ]


@pytest.mark.parametrize("name", EVERY)
def test_what_is_not_complete_is_text(name: str) -> None:
    """Wherever a message ends, what is shown as text has every letter of the calls that are not complete."""
    form, before = format_of(name), text_before(name)
    text = before + CALLS[name]
    for end in range(len(text)):
        _, content, calls = read(form, [text[:end]])
        for call in calls:
            assert json.loads(call[1]) in (json.loads(FIRST), json.loads(SECOND))
        if not calls and end > len(before):
            marks = {mark.strip() for mark in TOOL_FORMATS[name].section}
            rest = text[:end].strip()
            for mark in marks - {"", "[", "]", "[TOOL_CALLS]["}:
                rest, content = rest.replace(mark, ""), content.replace(mark, "")
            assert "".join(content.split()) == "".join(rest.split())


@pytest.mark.parametrize("name", EVERY)
def test_without_tools_calls_are_text(name: str) -> None:
    reasoning, content, calls = read(format_of(name), [thought(name) + CALLS[name]], tools=False)
    assert (reasoning, content, calls) == ("first {this}", CALLS[name], [])


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_reasoning(name: str) -> None:
    """Opened by the prompt or by the model, ended or not; its marks are not shown, nor white space beside them."""
    form = MessageFormat(REASONING_FORMATS[name], None)
    mark = REASONING_FORMATS[name]
    whole = f"{mark.open}\nwhy\n{mark.close}\n\n  so\n"
    assert read(form, [whole]) == read(form, list(whole)) == ("why", "so\n", [])
    inside = whole.removeprefix(mark.open)
    assert read(form, list(inside), opened=mark.open) == ("why", "so\n", [])
    assert read(form, ["why "], opened=mark.open) == ("why ", "", [])
    closed = f"{mark.open}\n{mark.close}\n\n"
    assert read(form, [" so"], opened=closed) == ("", " so", [])
    reasoning, content, _ = read(form, ["so "])
    assert (reasoning, content) == (("so ", "") if mark.implied else ("", "so "))
    assert "".join(read(form, [mark.open[:2]])[:2]) == mark.open[:2]


def test_tokens_of_reasoning_are_counted() -> None:
    """Those that have a letter of it or of its marks, and none of the content; by tokens, however they arrive."""
    pieces = ["<think>", "\nI", " see", "", ".</", "think", ">", "\n\n", "Yes", ", 1 <", " 2"]
    for size in (1, 2, 3, 20):
        parser = MessageParser(MessageFormat(REASONING_FORMATS["qwen3"], None), "")
        for start in range(0, len(pieces), size):
            parser.feed(pieces[start : start + size])
        parser.finish()
        assert parser.reasoning_tokens == 7
    opened = MessageParser(MessageFormat(REASONING_FORMATS["qwen3"], None), "<think>\n")
    opened.feed(["I", " see"])
    opened.finish()
    assert opened.reasoning_tokens == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\n{'name': 'find'}\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=find>\n<parameter=city>x\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=find>\nhello\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>find\n<arg_key>city</arg_key>\n</tool_call>"),
        ("llama3_json", '{"name": "find", "parameters": {"city": 1}'),
        ("pythonic", "[find(1)]"),
        ("pythonic", "[find(city=open('x'))]"),
        ("pythonic", "[find(**{})]"),
        ("mistral", '[TOOL_CALLS][{"name": "find"'),
        ("gemma4", "<|tool_call>call:find{city:}<tool_call|>"),
    ],
)
def test_what_cannot_be_read_is_text(name: str, text: str) -> None:
    for pieces in ([text], list(text[:300]) + [text[300:]]):
        assert read(format_of(name), pieces) == ("", text, [])


def test_text_beside_calls_is_kept() -> None:
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    for pieces in ([f" a \n{call}\n b {call} c \n"], list(f" a \n{call}\n b {call} c \n")):
        assert read(format_of("hermes"), pieces) == ("", " abc \n", [("find", "{}"), ("find", "{}")])
    broken = "<tool_call>{</tool_call>"
    assert read(format_of("hermes"), [f"a \n{broken}\n b"]) == ("", f"a \n{broken}\n b", [])


def test_a_call_at_the_start_only() -> None:
    """Formats without marks of their own are looked for only where a message begins."""
    text = 'For example: {"name": "find", "parameters": {}}'
    for pieces in ([text], list(text)):
        assert read(format_of("llama3_json"), pieces) == ("", text, [])
        assert read(format_of("llama3_json"), [" ", *pieces[0][13:], *pieces[1:]])[2] != [] or len(pieces) > 1


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", {"type": ["string", "null"]}, "3"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "integer"}, "true"),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ('{"a": 1}', {"$ref": "#/$defs/thing"}, {"a": 1}),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("2", {"enum": [1, 2]}, 2),
        ("NaN", {"type": "number"}, "NaN"),
        ('"x"', {}, "x"),
        ("x", {}, "x"),
    ],
)
def test_arguments_as_text_get_their_types(value: str, schema: dict[str, object], expected: object) -> None:
    root = {"properties": {"x": schema}, "$defs": {"thing": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": root}}]
    parser = MessageParser(format_of("qwen3_coder"), "", tools)
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    [(_, arguments)] = found(parser.feed([text]) + parser.finish())[2]
    assert json.loads(arguments) == {"x": expected} and type(json.loads(arguments)["x"]) is type(expected)


PUBLISHED = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>"},
    },
}


def test_a_published_response_template() -> None:
    """A tokenizer's own is followed, with types by the tools' schemas; what it cannot read is text."""
    form = published_format(PUBLISHED, None)
    text = "<think>why</think>so <call:find><city>Paris</city><count>2</count></call>"
    for pieces in ([text], list(text)):
        assert read(form, pieces) == ("why", "so", [("find", '{"city": "Paris", "count": 2}')])
    assert read(form, ["<call:find><city>Paris"]) == ("", "<call:find><city>Paris", [])
    with pytest.raises(ValueError, match="start_anchor"):
        published_format({"fields": {"content": {}}}, None)
