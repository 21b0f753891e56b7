"""How models write reasoning and tool calls: one table, from which messages are parsed and calls are forced.

Names are vLLM's, so that its `--tool-call-parser` and `--reasoning-parser` mean the same here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stridelm.chat.arguments import Body, JsonArguments, JsonObject, LooseJson, Parameters, PythonCalls

AUTO, NONE = "auto", "none"
NAME = r"(?P<name>[^\s<>{}\[\]()|]{1,256})"


@dataclass(frozen=True)
class ReasoningFormat:
    """open, close: literals around the reasoning. after: what stands between it and the answer. implied: the message
    begins with reasoning even where neither the prompt nor the model opens it."""

    open: str
    close: str
    after: str = "\n\n"
    implied: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """How calls stand in a message."""

    markers: tuple[str, ...]
    """All of them are in the chat template of a model that calls so."""
    opening: str
    """Pattern of what begins a call, up to its body. May have a group `name`, which may be empty."""
    body: Body
    begin: str
    """What precedes the body when a call is forced; {name} is the function's name."""
    end: str = ""
    """What follows it then."""
    closing: str = ""
    """The literal that ends the body; empty if the next opening or the end of the message does."""
    section: tuple[str, str] = ("", "")
    """Around all calls of a message."""
    between: str = "\n"
    """Between two calls."""
    single: bool = False
    """Only one call is possible per message."""
    at_start: bool = False
    """A call is one only at the start of a message."""
    names: str = r"[\w.:/-]+"
    """Pattern of the names that a call can have."""
    id_style: str = "openai"
    """Of call ids: openai, kimi (functions.NAME:INDEX) or mistral (nine letters and digits)."""


THINK = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    **dict.fromkeys(
        ("qwen3", "deepseek_v3", "glm45", "kimi_k2", "mimo", "minimax_m2", "holo2", "ernie45", "step3p5", "think"),
        THINK,
    ),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", implied=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", after=""),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>", after=""),
}

HERMES = ToolFormat(
    markers=("<tool_call>", "arguments"),
    opening=r"<tool_call>",
    closing="</tool_call>",
    body=JsonObject(),
    begin='<tool_call>\n{"name": "{name}", "arguments": ',
    end="}\n</tool_call>",
)
QWEN_XML = ToolFormat(
    markers=("<tool_call>", "<function="),
    opening=r"<tool_call>\s{0,8}<function=" + NAME + ">",
    closing="</tool_call>",
    body=Parameters(("<parameter=", ">\n", "\n</parameter>\n"), r"<parameter=([^>\n]+)>", "</function>"),
    begin="<tool_call>\n<function={name}>\n",
    end="</function>\n</tool_call>",
)
GLM = ToolFormat(
    markers=("<tool_call>", "<arg_key>"),
    opening=r"<tool_call>\s{0,8}" + NAME,
    closing="</tool_call>",
    body=Parameters(
        ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), r"<arg_key>([^<]+)</arg_key>\s*<arg_value>"
    ),
    begin="<tool_call>{name}\n",
    end="</tool_call>",
)
LLAMA_JSON = ToolFormat(
    markers=("dictionary of argument name and its value",),
    opening=r'(?:<\|python_tag\|>)?(?=\{\s{0,8}"(?:name|type|function|parameters)")',
    body=JsonObject(separator=";"),
    begin='{"name": "{name}", "parameters": ',
    end="}",
    single=True,
    at_start=True,
)
MISTRAL = ToolFormat(
    markers=("[TOOL_CALLS]",),
    opening=r"\[TOOL_CALLS\](?P<name>[\w.\-]{0,256})(?:\[CALL_ID\][a-zA-Z0-9]{1,64})?(?:\[ARGS\])?(?=\s{0,8}\[?\s{0,8}\{)",
    body=JsonObject(),
    begin='{"name": "{name}", "arguments": ',
    end="}",
    section=("[TOOL_CALLS][", "]"),
    between=", ",
    id_style="mistral",
)
MISTRAL_ARGS = ToolFormat(
    markers=("[TOOL_CALLS]", "[ARGS]"),
    opening=MISTRAL.opening,
    body=JsonObject(),
    begin="[TOOL_CALLS]{name}[ARGS]",
    between="",
    names=r"[\w.-]+",
    id_style="mistral",
)
DEEPSEEK_V3 = ToolFormat(
    markers=("<｜tool▁call▁begin｜>", "```json"),
    opening=r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]{1,256})\n```json\n",
    closing="<｜tool▁call▁end｜>",
    body=JsonArguments(fence="\n```"),
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK_V31 = ToolFormat(
    markers=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    opening=r"<｜tool▁call▁begin｜>(?P<name>[^\n<]{1,256})<｜tool▁sep｜>",
    closing="<｜tool▁call▁end｜>",
    body=JsonArguments(),
    begin="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    between="",
)
DSML = "｜DSML｜"
DEEPSEEK_V32 = ToolFormat(
    markers=("<｜DSML｜",),
    opening=rf'<{DSML}invoke name="(?P<name>[^"\n]{{1,256}})">',
    closing=f"</{DSML}invoke>",
    body=Parameters(
        (f'<{DSML}parameter name="', '" string="{text}">', f"</{DSML}parameter>\n"),
        rf'<{DSML}parameter name="([^"\n]+)"(?: string="(true|false)")?>',
    ),
    begin=f'<{DSML}invoke name="{{name}}">\n',
    end=f"</{DSML}invoke>\n",
    section=(f"<{DSML}function_calls>\n", f"</{DSML}function_calls>"),
    between="",
)
KIMI = ToolFormat(
    markers=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    opening=r"<\|tool_call_begin\|>\s{0,8}(?:functions\.)?(?P<name>[^\n<:]{1,256})(?::\d{1,9})?\s{0,8}<\|tool_call_argument_begin\|>",
    closing="<|tool_call_end|>",
    body=JsonArguments(),
    begin="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    between="",
    names=r"[\w./-]+",
    id_style="kimi",
)
MINIMAX = ToolFormat(
    markers=("<minimax:tool_call>",),
    opening=r'<invoke name="(?P<name>[^"\n]{1,256})">',
    closing="</invoke>",
    body=Parameters(('<parameter name="', '">', "</parameter>\n"), r'<parameter name="([^"\n]+)">'),
    begin='<invoke name="{name}">\n',
    end="</invoke>\n",
    section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    between="",
)
GEMMA4 = ToolFormat(
    markers=("<|tool_call>",),
    opening=r"<\|tool_call>call:(?P<name>[\w.\-]{1,256})",
    closing="<tool_call|>",
    body=LooseJson('<|"|>'),
    begin="<|tool_call>call:{name}",
    end="<tool_call|>",
    between="",
    names=r"[\w.-]+",
)
PYTHONIC = ToolFormat(
    markers=("[func_name1(params_name1=params_value1",),
    opening=r"(?:<\|python_start\|>)?(?=\[\s{0,8}[A-Za-z_][\w.]{0,255}\()",
    body=PythonCalls(),
    begin="{name}(",
    end=")",
    section=("[", "]"),
    between=", ",
    names=r"[A-Za-z_][\w.]*",
    at_start=True,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "kimi_k2": KIMI,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "minimax_m2": MINIMAX,
    "gemma4": GEMMA4,
    **dict.fromkeys(("glm45", "glm47"), GLM),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "mimo"), QWEN_XML),
    "mistral_args": MISTRAL_ARGS,
    "mistral": MISTRAL,
    "hermes": HERMES,
    **dict.fromkeys(("llama3_json", "llama4_json"), LLAMA_JSON),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), PYTHONIC),
}
"""In the order in which a chat template is searched for their markers: a format that has another's comes first."""


def tool_format_of(template: str) -> str | None:
    """The name of the format that a chat template teaches its model; None if it teaches none."""
    return next((name for name, form in TOOL_FORMATS.items() if all(mark in template for mark in form.markers)), None)


def reasoning_format_of(template: str) -> str | None:
    """The name of the format of a chat template that mentions reasoning."""
    return next((name for name in ("think", "mistral", "gemma4") if REASONING_FORMATS[name].close in template), None)


def check_formats(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raises ValueError for names that are not in the tables."""
    for option, name, known in (
        ("tool_call_parser", tool_call_parser, TOOL_FORMATS),
        ("reasoning_parser", reasoning_parser, REASONING_FORMATS),
    ):
        if name not in (AUTO, NONE, *known):
            raise ValueError(f"{option} {name!r} is not known; choose one of: {', '.join((AUTO, NONE, *known))}")
