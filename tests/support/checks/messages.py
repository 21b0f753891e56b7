"""The same message in every format: reasoning, text, and two calls."""

from __future__ import annotations

from typing import Any

from stridelm.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from stridelm.chat.message_format import MessageFormat

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "find a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "count": {"type": "integer"},
                    "near": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "find_all"}},
]
FIRST = '{"city": "Zürich \\"Süd\\"", "count": 3, "near": [1.5, -2]}'
SECOND = '{"city": "<b>"}'
CITY = 'Zürich "Süd"'
THOUGHT = "<think>\nfirst {this}\n</think>\n\n"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>find<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
CALLS = {
    "hermes": "\n".join(
        f'<tool_call>\n{{"name": "find", "arguments": {arguments}}}\n</tool_call>' for arguments in (FIRST, SECOND)
    ),
    "qwen3_coder": (
        f"<tool_call>\n<function=find>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
        "<parameter=near>\n[1.5, -2]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=find>\n<parameter=city>\n<b>\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm45": (
        f"<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>count</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>near</arg_key>\n<arg_value>[1.5, -2]</arg_value>\n</tool_call>\n"
        "<tool_call>find\n<arg_key>city</arg_key>\n<arg_value><b></arg_value>\n</tool_call>"
    ),
    "kimi_k2": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{FIRST}"
        f"<|tool_call_end|><|tool_call_begin|>functions.find:1<|tool_call_argument_begin|>{SECOND}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "deepseek_v3": f"<｜tool▁calls▁begin｜>{V3 % FIRST}\n{V3 % SECOND}<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜>{V31 % FIRST}{V31 % SECOND}<｜tool▁calls▁end｜>",
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="city" string="true">'
        f'{CITY}</｜DSML｜parameter>\n<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="near" string="false">[1.5, -2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="city" string="true"><b></｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "minimax_m2": (
        f'<minimax:tool_call>\n<invoke name="find">\n<parameter name="city">{CITY}</parameter>\n'
        '<parameter name="count">3</parameter>\n<parameter name="near">[1.5, -2]</parameter>\n</invoke>\n'
        '<invoke name="find">\n<parameter name="city"><b></parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "gemma4": (
        f'<|tool_call>call:find{{city:<|"|>{CITY}<|"|>,count:3,near:[1.5,-2]}}<tool_call|>'
        '<|tool_call>call:find{city:<|"|><b><|"|>}<tool_call|>'
    ),
    "mistral": f'[TOOL_CALLS][{{"name": "find", "arguments": {FIRST}}}, {{"name": "find", "arguments": {SECOND}}}]',
    "mistral_args": f"[TOOL_CALLS]find[ARGS]{FIRST}[TOOL_CALLS]find[ARGS]{SECOND}",
    "llama3_json": f'{{"name": "find", "parameters": {FIRST}}}; {{"name": "find", "parameters": {SECOND}}}',
    "pythonic": f"[find(city='{CITY}', count=3, near=[1.5, -2]), find(city=\"<b>\")]",
}
"""Format -> the calls. Names of the table that mean the same format have one entry."""
THOUGHTS = {
    "gemma4": "<|channel>thought\nfirst {this}<channel|>",
    **dict.fromkeys(("mistral", "mistral_args"), "[THINK]first {this}[/THINK]"),
}
REASONING = {"gemma4": "gemma4", "mistral": "mistral", "mistral_args": "mistral"}


def format_of(name: str) -> MessageFormat:
    return MessageFormat(REASONING_FORMATS[REASONING.get(name, "qwen3")], TOOL_FORMATS[name], "A:")


def thought(name: str) -> str:
    return THOUGHTS.get(name, THOUGHT)


def text_before(name: str) -> str:
    """Content, where calls may follow it."""
    return "" if TOOL_FORMATS[name].at_start else "I look.\n"
