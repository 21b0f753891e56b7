"""Requests of Anthropic's Messages API, and how they become chat's. Parameters that neither has are refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stridelm.params import MAX_STOPS
from stridelm.server import agents
from stridelm.server.errors import bad_request
from stridelm.server.openai.inert import Rows, by_name
from stridelm.server.openai.schemas import MAX_MESSAGES, ChatRequest, StopText
from stridelm.server.validation import Body

Fields = dict[str, Any]
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
FAILED = "The tool failed:"
"""Before the result of a tool that has is_error, which chat templates do not know."""
NO_EDITS: tuple[Any, ...] = ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Body):
    """enabled and disabled: the chat template's variable enable_thinking; adaptive leaves it to the template.
    budget_tokens: a hint, without effect. display: omitted leaves thinking out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputOptions(Body):
    """effort: the chat template's variable reasoning_effort, where max is xhigh."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountRequest(agents.AgentRequest):
    stubs: ClassVar[Fields] = {"messages": [{"role": "user", "content": ""}], "system": None}
    refused: ClassVar[Rows] = agents.REFUSED | by_name(
        {
            "stop": ("messages call it stop_sequences",),
            "container mcp_servers": ("the server runs no tools; give the model some, and run them yourself", []),
            "context_management": ("messages are not edited; send those that the model is to read", {}, *NO_EDITS),
            "speed": ("there is one speed; leave it out", "standard"),
        }
    )

    messages: list[Message] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    system: str | list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions = OutputOptions()
    output_format: dict[str, Any] | None = None
    """The older place of output_config.format."""
    cache_control: dict[str, Any] | None = None
    """No effect, here and in blocks: equal prefixes are found without it."""
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]

    def as_chat(self) -> ChatRequest:
        choice, effort = self.tool_choice, self.output_config.effort
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise bad_request("tool_choice: a name goes with the type tool", "tool_choice")
        messages = _messages(self)
        tools = [{**tool, "parameters": tool.get("input_schema")} for tool in self.tools or ()]
        return self.chat(
            messages=messages,
            continue_final_message=messages[-1]["role"] == "assistant",
            tools=agents.functions(tools, "custom"),
            tool_choice=None if choice is None else CHOICES.get(choice.type) or agents.named(choice.model_dump()),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            response_format=agents.output_format(self.output_format or self.output_config.format),
            reasoning_effort="xhigh" if effort == "max" else effort,
            chat_template_kwargs=_variables(self),
            max_tokens=None,
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences if isinstance(self, MessagesRequest) else None,
            **dict.fromkeys(("metadata", "service_tier")),
        )


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), StopText] | None = None


def _variables(body: CountRequest) -> Fields | None:
    thinking, variables = body.thinking, body.chat_template_kwargs
    if thinking is None or thinking.type == "adaptive":
        return variables
    if variables is not None and "enable_thinking" in variables:
        raise bad_request("thinking is in chat_template_kwargs too, as enable_thinking; give only one", "thinking")
    return {**(variables or {}), "enable_thinking": thinking.type == "enabled"}


def _messages(body: CountRequest) -> list[Fields]:
    messages: list[Fields] = [{"role": "system", "content": agents.listed(body.system)}] if body.system else []
    names = dict[str, str]()  # of the tools that calls are of
    for message in body.messages:
        messages += _assistants(message, names) if message.role == "assistant" else _others(message, names)
    if "tool_calls" in messages[-1]:
        raise bad_request("messages: the last one calls tools; send their results as tool_result", "messages")
    return messages


def _assistants(message: Message, names: dict[str, str]) -> list[Fields]:
    said: Fields = {"role": message.role, "content": []}
    for block in agents.listed(message.content):
        kind = agents.kind_of(block)
        if kind == "tool_use":
            id, name = agents.needed(block, "id", "name")
            names[id] = name
            said.setdefault("tool_calls", []).append(agents.tool_call(id, name, block.get("input")))
        elif kind == "thinking":
            said["reasoning_content"] = said.get("reasoning_content", "") + agents.needed(block, "thinking")[0]
        elif kind != "redacted_thinking":  # another server's, which cannot be read here
            said["content"].append(block)
    return [said]


def _others(message: Message, names: dict[str, str]) -> list[Fields]:
    """A user's message, or a system's. Results of tools in it are messages of their own."""
    messages: list[Fields] = []
    for block in agents.listed(message.content):
        if agents.kind_of(block) == "tool_result":
            [id] = agents.needed(block, "tool_use_id")
            content = (agents.listed(FAILED) if block.get("is_error") else []) + agents.listed(
                block.get("content") or ""
            )
            messages.append(agents.tool_result(id, content, names))
        elif messages and messages[-1]["role"] == message.role:
            messages[-1]["content"].append(block)
        else:
            messages.append({"role": message.role, "content": [block]})
    return messages or [{"role": message.role, "content": []}]
