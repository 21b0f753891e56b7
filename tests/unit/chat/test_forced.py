"""Calls that are forced are read back by the same format, and their arguments follow their schemas."""

from __future__ import annotations

import json
from itertools import product
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from stridelm.chat.forced import Wanted, structure
from stridelm.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from stridelm.chat.message_format import MessageFormat
from stridelm.chat.parser import MessageParser
from stridelm.chat.parts import Text, ToolCall
from stridelm.grammar.compiler import Grammars
from stridelm.params import StructuredOutputs
from stridelm.text.tokenizer import Tokenizer
from support.checks.messages import CALLS, REASONING

LONGEST = 400
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["a", "b c"]},
                    "count": {"type": "integer", "maximum": 99, "minimum": 0},
                    "fast": {"type": "boolean"},
                    "why": {"enum": ["x", "y"]},
                },
                "required": ["count"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "find_all", "strict": True}},
]
SCHEMAS = {"find": TOOLS[0]["function"]["parameters"], "find_all": {"type": "object"}}
ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def output(grammars: Grammars, tokenizer: Tokenizer, spec: dict[str, Any], seed: int, begin: str = "") -> str | None:
    """A text drawn from what the structure allows after `begin`, which it allows too; None if it did not end soon."""
    matcher = grammars.compile(StructuredOutputs.of(spec)).matcher.deep_copy()
    draw, ids = Random(seed), tokenizer.encode(begin, False)
    assert matcher.try_consume_tokens(ids) == len(ids), begin
    for _ in range(LONGEST):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: tokenizer.vocab_size]).tolist()
        assert not matcher.is_error() and allowed
        ends = [token for token in allowed if token in tokenizer.eos_ids]
        if ends and (len(ends) == len(allowed) or draw.random() < 0.4):
            return tokenizer.decode(ids, False)
        ids.append(draw.choice([token for token in allowed if token not in tokenizer.eos_ids]))
        assert matcher.try_consume_tokens([ids[-1]]) == 1
    return None


def begins(form: MessageFormat, free: bool) -> list[str]:
    """How a message may begin: with a call, and where the model may reason also with that."""
    assert form.tools is not None
    call = form.tools.section[0] + form.tools.begin.partition("{name}")[0]
    mark = form.reasoning
    return [call] if mark is None or not free else [call, f"{mark.open}hm{mark.close}{mark.after}"]


def form_of(name: str, reasoning: bool) -> MessageFormat:
    return MessageFormat(REASONING_FORMATS[REASONING.get(name, "qwen3")] if reasoning else None, TOOL_FORMATS[name])


@pytest.mark.parametrize("parallel", [True, False], ids=["several", "one"])
@pytest.mark.parametrize("state", ["none", "free", "closed"])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_required(grammars: Grammars, tokenizer: Tokenizer, name: str, state: str, parallel: bool) -> None:
    """Only calls, at least one; reasoning before them where the model may reason."""
    form = form_of(name, state != "none")
    opened = form.reasoning.open + form.reasoning.close if form.reasoning is not None and state == "closed" else ""
    spec = structure(form, opened, Wanted(TOOLS, "required", parallel))
    assert spec is not None
    ended = set()
    for seed, begin in product(range(6), begins(form, state == "free")):
        text = output(grammars, tokenizer, spec, seed, begin)
        if text is None:
            continue
        ended.add(begin)
        parser = MessageParser(form, opened, TOOLS)
        parts = parser.feed([text]) + parser.finish()
        calls = [part for part in parts if isinstance(part, ToolCall)]
        assert calls and (parallel or len(calls) == 1)
        assert not [part for part in parts if isinstance(part, Text) and part.field == "content"], text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert ended == set(begins(form, state == "free"))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_named(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    form = form_of(name, False)
    spec = structure(form, "", Wanted(TOOLS[1:], "required", parallel=False))
    assert spec is not None
    text = output(grammars, tokenizer, spec, 0)
    assert text is not None
    parser = MessageParser(form, "", TOOLS)
    [call] = parser.feed([text]) + parser.finish()
    assert isinstance(call, ToolCall) and (call.name, json.loads(call.arguments)) == ("find_all", {})


@pytest.mark.parametrize("name", sorted(CALLS))
def test_an_answer_or_calls(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    """Beside tools that may be called, a structured answer is one of both."""
    form = form_of(name, False)
    spec = structure(form, "", Wanted(TOOLS, "auto", answer={"json": json.dumps(ANSWER)}))
    assert spec is not None
    kinds = set()
    for seed, begin in product(range(4), (*begins(form, False), "{")):
        text = output(grammars, tokenizer, spec, seed, begin)
        if text is not None:
            parser = MessageParser(form, "", TOOLS)
            parts = parser.feed([text]) + parser.finish()
            if isinstance(parts[0], Text):
                jsonschema.validate(json.loads(parts[0].text), ANSWER)
            kinds.add(type(parts[0]))
    assert kinds == {Text, ToolCall}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_strict_calls_in_free_text(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    """A strict tool under `auto`: text is free, and a call that has begun can only become a valid one."""
    form = form_of(name, False)
    spec = structure(form, "", Wanted(TOOLS, "auto"))
    assert spec is not None
    matcher = grammars.compile(StructuredOutputs.of(spec)).matcher
    begin, _ = TOOL_FORMATS[name].section
    call = TOOL_FORMATS[name].begin.replace("{name}", "find_all").replace("{index}", "0")

    def allows(text: str) -> bool:
        other = matcher.deep_copy()
        ids = tokenizer.encode(text, False)
        return bool(other.try_consume_tokens(ids) == len(ids))

    text = "" if TOOL_FORMATS[name].at_start else "Hello.\n"
    assert allows("Hello, you.\nA < b") and allows(text + begin + call)
    assert not allows(text + begin + call.replace("find_all", "lose"))
    assert structure(form, "", Wanted(TOOLS[:1], "auto")) is None
    assert structure(form, "", Wanted(TOOLS[:1], "auto", parallel=False)) is not None


def test_answers_follow_reasoning(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The structure of an answer begins after reasoning, where the prompt has begun that or the model does."""
    form = MessageFormat(REASONING_FORMATS["qwen3"], None)
    for kind in ({"json": json.dumps(ANSWER)}, {"regex": "[ab]{3}"}, {"choice": ["a", "b"]}, {"json_object": True}):
        wanted = Wanted(answer=kind)
        assert structure(form, "<think>\n</think>", wanted) == kind
        inside = structure(form, "<think>\n", wanted)
        free = structure(form, "", wanted)
        assert inside is not None and free is not None
        assert output(grammars, tokenizer, inside, 1, "so</think>\n\n") is not None
        assert output(grammars, tokenizer, free, 1, "<think>so</think>\n\n") is not None
        for spec in (inside, free):
            with pytest.raises(AssertionError):
                output(grammars, tokenizer, spec, 1, "<think>so</think>\n\nand more")


@pytest.mark.parametrize(
    ("name", "parameters", "word"),
    [
        ("qwen3_coder", {"properties": {"x": {"type": "string", "pattern": "a+"}}}, "pattern"),
        ("gemma4", {"properties": {"x": {"type": "array"}}}, "'x'"),
        ("pythonic", {"required": ["y"], "properties": {}}, "'y'"),
        ("glm45", {"properties": {"x": True}}, "properties"),
    ],
)
def test_what_cannot_be_forced(name: str, parameters: dict[str, Any], word: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}]
    with pytest.raises(ValueError, match=f"tool 'f'.*{word}"):
        structure(form_of(name, False), "", Wanted(tools, "required"))


def test_no_format_no_calls() -> None:
    with pytest.raises(ValueError, match="--tool-call-parser"):
        structure(MessageFormat(None, None), "", Wanted(TOOLS, "required"))
    with pytest.raises(ValueError, match="no effect"):
        structure(form_of("hermes", False), "", Wanted(TOOLS, "required", answer={"regex": "a"}))
