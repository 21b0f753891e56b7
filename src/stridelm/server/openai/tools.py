"""What a chat request asks of its message: tools, reasoning, structure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stridelm.chat.forced import Wanted, structure
from stridelm.chat.model_chat import ModelChat
from stridelm.chat.parser import MessageParser
from stridelm.chat.parts import Part, Text
from stridelm.params import SamplingParams, StructuredOutputs
from stridelm.server.chunk import Chunk
from stridelm.server.engine_client import Prompt
from stridelm.server.errors import bad_request
from stridelm.server.openai.schemas import AllowedTools, ChatRequest, NamedTool

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class MessageReading:
    """What a conversation asks for, and how the answer is read. parser: makes one for a message; None where there is
    nothing to find in it."""

    prompt: Prompt
    parser: Callable[[], MessageParser] | None = None


def callable_tools(body: ChatRequest, chat: ModelChat) -> Tools:
    """The tools that may be called. Raises ApiError for tools that would have no effect."""
    choice, tools = body.tool_choice, body.tools or []
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, but there are no tools; give some", "tool_choice")
        return ()
    if choice == "none":
        return ()
    if chat.form.call_region is None:
        raise bad_request(
            "tools: how this model calls them is not known; start with --tool-call-parser, or leave them out",
            "tools",
        )
    if choice in (None, "auto") and not chat.habits.reads_tools:
        raise bad_request(
            "tools: the model's chat template does not tell it of them; start the server with a --chat-template that "
            "does, or make tool_choice required",
            "tools",
        )
    if isinstance(choice, NamedTool):
        return _chosen(tools, [choice])
    return _chosen(tools, choice.allowed_tools.tools) if isinstance(choice, AllowedTools) else tools


def message_reading(
    body: ChatRequest, chat: ModelChat, tools: Tools, ids: array[int], params: SamplingParams
) -> MessageReading:
    """tools: from `callable_tools`. Raises ApiError for what cannot be forced in the model's format."""
    if not tools and chat.form.reasoning is None:
        return MessageReading(Prompt(ids, params))
    choice = body.tool_choice
    required = choice == "required" or isinstance(choice, NamedTool)
    if isinstance(choice, AllowedTools):
        required = choice.allowed_tools.mode == "required"
    answer = None
    if params.structured_outputs is not None:
        given = StructuredOutputs.of(params.structured_outputs)
        answer = {given.kind: getattr(given, given.kind)}
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    only = len(tools) < len(body.tools or ())
    wanted = Wanted(tools, "required" if required else "auto", parallel, only, answer)
    opened = chat.opened(ids)
    try:
        structured = structure(chat.form, opened, wanted)
    except (ValueError, RecursionError) as error:
        param = "tools" if tools else "structured_outputs"
        why = error if type(error) is ValueError else "the structure of the answer cannot be read"
        raise bad_request(f"{param}: {why}", param) from error
    if structured is not None and structured != answer:
        params = replace(params, structured_outputs=structured)
    reasoning = body.separate_reasoning is not False
    prompt = Prompt(ids, params, kept=chat.kept)
    return MessageReading(prompt, lambda: MessageParser(chat.form, opened, tools, reasoning))


def parts_of(parser: MessageParser | None, chunk: Chunk) -> Sequence[Part]:
    """What more output adds to a message. parser: None where all of it is content."""
    if parser is None:
        return [Text("content", chunk.text)] if chunk.text else []
    return parser.feed(chunk.pieces) + (parser.finish() if chunk.finish is not None else [])


def message_of(parts: Iterable[Part], with_reasoning: bool, streamed: bool) -> dict[str, Any]:
    """Parts as fields of a message, or of a stream's delta. Reasoning has both names that clients look for."""
    said: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls = []
    for part in parts:
        if isinstance(part, Text):
            said[part.field].append(part.text)
        else:
            place = {"index": part.index} if streamed else {}
            function = {"name": part.name, "arguments": part.arguments}
            calls.append({**place, "id": part.id, "type": "function", "function": function})
    fields: dict[str, Any] = {}
    content, reasoning = "".join(said["content"]), "".join(said["reasoning"])
    if content or not streamed:
        fields["content"] = content if content or not calls else None
    if reasoning and with_reasoning:
        fields["reasoning_content"] = fields["reasoning"] = reasoning
    if calls:
        fields["tool_calls"] = calls
    return fields


def _chosen(tools: Tools, wanted: Sequence[NamedTool]) -> Tools:
    names = [one.function.name for one in wanted]
    found = [tool for tool in tools if tool["function"]["name"] in names]
    if missing := set(names) - {tool["function"]["name"] for tool in found}:
        raise bad_request(
            f"tool_choice: no tool is called {sorted(missing)[0]!r}; name one of the tools", "tool_choice"
        )
    return found
