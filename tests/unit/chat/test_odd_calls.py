"""What a newcomer and a hostile client found in messages with tools and reasoning. Each failed when written."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

import jsonschema
import pytest

from stridelm.chat.forced import Wanted, structure
from stridelm.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from stridelm.chat.message_format import MessageFormat
from stridelm.chat.parser import MessageParser
from stridelm.chat.parts import Part, Text, ToolCall
from stridelm.chat.template import habits_of
from stridelm.grammar.compiler import Grammars
from stridelm.params import StructuredOutputs
from stridelm.text.tokenizer import Tokenizer
from support.oracles.published import published


def form_of(name: str) -> MessageFormat:
    return MessageFormat(None, TOOL_FORMATS[name])


def tools_of(parameters: Any, name: str = "f") -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


def read(name: str, text: str, parameters: Any = None, function: str = "f") -> list[Part]:
    parser = MessageParser(form_of(name), "", tools_of(parameters or {}, function))
    return parser.feed([text]) + parser.finish()


def allows(grammars: Grammars, tokenizer: Tokenizer, name: str, text: str, parameters: Any, function: str) -> bool:
    """Whether a forced call may be this text; False also if it is refused."""
    try:
        spec = structure(form_of(name), "", Wanted(tools_of(parameters, function), "required", parallel=False))
    except ValueError:
        return False
    assert spec is not None
    matcher = grammars.compile(StructuredOutputs.of(spec)).matcher.deep_copy()
    ids = tokenizer.encode(text, False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("name", ["gemma4", "pythonic"])
def test_structure_grows_with_optional_parameters_not_with_its_power(name: str) -> None:
    """Twice the text at most for twice the parameters, with some to spare; it doubles with each one."""
    sizes = []
    for count in (5, 10):
        parameters = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}
        spec = structure(form_of(name), "", Wanted(tools_of(parameters), "required"))
        assert spec is not None
        sizes.append(len(spec["structural_tag"]))
    assert sizes[1] < 5 * sizes[0], sizes


def test_references_that_branch_end() -> None:
    """It runs for hours, so in a process that is ended."""
    code = (
        "from stridelm.chat.schema_types import types_of\n"
        "a = {'anyOf': [{'$ref': '#/$defs/a'}] * 20}\n"
        "types_of({'$ref': '#/$defs/a'}, {'$defs': {'a': a}})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=10)


@pytest.mark.parametrize("name", ["gemma4", "pythonic", "qwen3_coder"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"required": 5},
        {"required": True},
        {"required": [["x"]]},
        {"properties": {"x": {"type": "string", "enum": 5}}},
        {"properties": {"x": {"type": "object", "properties": {"y": {"type": "integer"}}, "required": 5}}},
    ],
    ids=str,
)
def test_odd_schemas_are_refused(name: str, parameters: Any) -> None:
    """No other error than ValueError: that is a 500."""
    with contextlib.suppress(ValueError):
        structure(form_of(name), "", Wanted(tools_of(parameters), "required"))


@pytest.mark.parametrize("tag", ["{}", "[]", "5", {"structures": [], "triggers": []}], ids=str)
def test_an_odd_structural_tag_beside_tools_is_refused(tag: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        structure(form_of("hermes"), "", Wanted(tools_of({}), "auto", answer={"structural_tag": tag}))


@pytest.mark.parametrize("calls", [5, True, 1.5])
def test_odd_tool_calls_of_messages_are_refused(tokenizer: Tokenizer, calls: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        habits_of(tokenizer).messages([{"role": "assistant", "content": "x", "tool_calls": calls}])


@pytest.mark.parametrize("value", ["{1, 2}", "b'a'", "...", "1j", "{(1, 2): 3}", "{[]: 1}"])
def test_python_that_is_not_json_is_text(value: str) -> None:
    text = f"[f(x={value})]"
    assert read("pythonic", text) == [Text("content", text)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[f(x='\\ud800')]"),
        ("gemma4", '<|tool_call>call:f{x:"\\ud800"}<tool_call|>'),
        ("qwen3_coder", '<tool_call>\n<function=f>\n<parameter=x>\n"\\ud800"\n</parameter>\n</function>\n</tool_call>'),
    ],
)
def test_arguments_can_be_sent(name: str, text: str) -> None:
    """Half a surrogate pair cannot be encoded: the answer is a 500."""
    for part in read(name, text):
        (part.text if isinstance(part, Text) else part.arguments).encode()


@pytest.mark.parametrize("properties", [[1], "x", 5])
def test_odd_properties_do_not_break_reading(properties: Any) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    assert read("qwen3_coder", text, {"properties": properties})


def test_an_object_with_a_name_is_not_a_call() -> None:
    """Llama's format has no marks: without parameters it is an answer in JSON, of which all but the name gets lost."""
    text = '{"name": "Bob", "age": 3}'
    assert read("llama3_json", text) == [Text("content", text)]


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
        {"enum": ["a", 1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_optional_text_has_no_quotes(grammars: Grammars, tokenizer: Tokenizer, name: str, schema: Any) -> None:
    """Forced as it is read: plain."""
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    text = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    }[name]
    assert allows(grammars, tokenizer, name, text, parameters, "f")
    [call] = read(name, text, parameters)
    assert isinstance(call, ToolCall) and json.loads(call.arguments) == {"x": "a"}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "gemma4", "pythonic"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"v": {"type": "integer"}}, "required": ["v"]}}},
        {"allOf": [{"properties": {"v": {"type": "integer"}}, "required": ["v"]}]},
    ],
    ids=["ref", "allOf"],
)
def test_parameters_behind_a_reference(grammars: Grammars, tokenizer: Tokenizer, name: str, parameters: Any) -> None:
    """pydantic writes recursive models so. A call without arguments must not be what is forced."""
    text = {
        "qwen3_coder": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f\n</tool_call>",
        "gemma4": "<|tool_call>call:f{}<tool_call|>",
        "pythonic": "[f()]",
    }[name]
    if allows(grammars, tokenizer, name, text, parameters, "f"):
        [call] = read(name, text, parameters)
        assert isinstance(call, ToolCall)
        jsonschema.validate(json.loads(call.arguments), parameters)


X = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("name", "function", "text"),
    [
        (
            "kimi_k2",
            "a:b",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.a:b:0<|tool_call_argument_begin|>",
        ),
        ("gemma4", "a/b", '<|tool_call>call:a/b{x:<|"|>y<|"|>}<tool_call|>'),
        ("gemma4", "a:b", '<|tool_call>call:a:b{x:<|"|>y<|"|>}<tool_call|>'),
        ("mistral_args", "a/b", '[TOOL_CALLS]a/b[ARGS]{"x":"y"}'),
        ("pythonic", "a-b", '[a-b(x="y")]'),
        ("pythonic", "class", '[class(x="y")]'),
    ],
)
def test_names_that_are_forced_are_read(
    grammars: Grammars, tokenizer: Tokenizer, name: str, function: str, text: str
) -> None:
    if name == "kimi_k2":
        text += '{"x":"y"}<|tool_call_end|><|tool_calls_section_end|>'
    if allows(grammars, tokenizer, name, text, X, function):
        [call] = read(name, text, X, function)
        assert isinstance(call, ToolCall) and call.name == function


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [
        ("gemma4", "a-b", "<|tool_call>call:f{a-b:1}<tool_call|>"),
        ("gemma4", "@id", "<|tool_call>call:f{@id:1}<tool_call|>"),
        ("pythonic", "from", "[f(from=1)]"),
        ("pythonic", "a-b", "[f(a-b=1)]"),
        (
            "qwen3_coder",
            "a>b",
            "<tool_call>\n<function=f>\n<parameter=a>b>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
        ("glm45", "a<b", "<tool_call>f\n<arg_key>a<b</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ],
)
def test_keys_that_are_forced_are_read(
    grammars: Grammars, tokenizer: Tokenizer, name: str, key: str, text: str
) -> None:
    parameters = {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]}
    if allows(grammars, tokenizer, name, text, parameters, "f"):
        [call] = read(name, text, parameters)
        assert isinstance(call, ToolCall) and json.loads(call.arguments) == {key: 1}


def test_reasoning_is_counted_alike_with_tokens_that_have_no_text() -> None:
    """The last token often has none: it ends the message, or is part of a letter."""
    counts = set()
    for size in (1, 3):
        parser = MessageParser(MessageFormat(REASONING_FORMATS["qwen3"], None), "<think>")
        pieces = ["I", " see", ""]
        for begin in range(0, 3, size):
            parser.feed(pieces[begin : begin + size])
        parser.finish()
        counts.add(parser.reasoning_tokens)
    assert len(counts) == 1, counts


def test_text_beside_calls_of_a_message_is_not_dropped() -> None:
    """Rendered, or refused."""
    tokenizer = published("deepseek_v3")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "I look first", "tool_calls": [call]}
    text = tokenizer.render_chat(habits_of(tokenizer).messages([{"role": "user", "content": "Q"}, said]))
    assert "I look first" in text


def test_reasoning_is_counted_alike_beside_marks() -> None:
    """The mark around calls is not in the count of letters, so all that follows it is counted too late."""
    form = MessageFormat(REASONING_FORMATS["qwen3"], TOOL_FORMATS["kimi_k2"])
    counts = []
    for before in ("a", "<|tool_calls_section_begin|>"):
        parser = MessageParser(form, "", tools_of({}))
        for piece in (before, "b", "<think>", "hm", "</think>", "z"):
            parser.feed([piece])
        parser.finish()
        counts.append(parser.reasoning_tokens)
    assert counts == [3, 3]


def test_a_message_that_goes_on_has_begun() -> None:
    """Formats without marks: after text of the prompt, an object is no call."""
    parser = MessageParser(form_of("llama3_json"), "For example: ", tools_of({}))
    text = '{"name": "f", "parameters": {}}'
    assert parser.feed([text]) + parser.finish() == [Text("content", text)]


def test_definitions_are_not_copied_for_each_parameter() -> None:
    """The text of the structure grows with the parameters times their definitions."""
    sizes = []
    for count in (50, 100):
        definitions = {f"d{i}": {"type": "integer"} for i in range(count)}
        properties = {f"p{i}": {"type": "integer"} for i in range(count)}
        parameters = {"type": "object", "$defs": definitions, "properties": properties}
        spec = structure(form_of("qwen3_coder"), "", Wanted(tools_of(parameters), "required"))
        assert spec is not None
        sizes.append(len(spec["structural_tag"]))
    assert sizes[1] < 3 * sizes[0], sizes


@pytest.mark.parametrize("family", ["llama3_1", "gemma3"])
def test_calls_that_a_template_leaves_out_are_refused(family: str) -> None:
    """As tools are: the model would see an empty message of its own."""
    tokenizer = published(family)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    try:
        messages = habits_of(tokenizer).messages([{"role": "user", "content": "Q"}, said])
    except ValueError:
        return
    assert "look" in tokenizer.render_chat(messages)
