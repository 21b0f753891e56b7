"""Requests of OpenAI's Responses API, and how they become chat's. Parameters that neither has are refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from stridelm.params import MAX_LOGPROBS
from stridelm.server import agents
from stridelm.server.errors import bad_request
from stridelm.server.openai.inert import Key, Rows, Value, by_name
from stridelm.server.openai.schemas import MAX_MESSAGES, ChatRequest
from stridelm.server.validation import Body

Fields = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
NOT_STORED = "nothing is stored; send the whole conversation as input"
Items = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class TextOptions(Body):
    """verbosity: a hint, without effect."""

    format: dict[str, Any] = {"type": "text"}  # noqa: RUF012
    verbosity: Literal["low", "medium", "high"] = "medium"


class ReasoningOptions(Body):
    """effort: a variable of the chat template. summary: a hint; reasoning is returned as it is."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(agents.AgentRequest):
    stubs: ClassVar[Fields] = {"input": "", "instructions": None}
    refused: ClassVar[Rows] = agents.REFUSED | by_name(
        {
            "previous_response_id conversation": (NOT_STORED,),
            "background": ("answers are not stored to be fetched later; use stream", False),
            "prompt": ("prompt templates are not stored; send their text as instructions and input",),
            "max_tool_calls": ("it counts calls of tools that a server runs, and there are none; leave it out",),
            "truncation": ("prompts are never cut; send a shorter input", "disabled"),
            "messages": ("messages go to /v1/chat/completions; here, use input",),
            "max_tokens": ("responses call it max_output_tokens",),
            "logprobs": ('use include: ["message.output_text.logprobs"], and top_logprobs', False),
        }
    )

    input: Annotated[
        Annotated[str, Tag("~text")] | Annotated[Items, Tag("~items")],
        Discriminator(lambda value: "~text" if isinstance(value, str) else "~items"),
    ]
    instructions: str | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = ReasoningOptions()
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """reasoning.encrypted_content has no effect: reasoning is never encrypted."""
    client_metadata: dict[Key, Value] | None = None
    """Codex's, without effect."""

    def as_chat(self) -> ChatRequest:
        choice, scored = self.tool_choice, LOGPROBS in (self.include or ())
        if self.top_logprobs and not scored:
            raise bad_request(f'top_logprobs would have no effect without include: ["{LOGPROBS}"]', "top_logprobs")
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            tools = [agents.named(tool) for tool in agents.listed(choice.get("tools"))]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
        elif isinstance(choice, dict):
            if agents.kind_of(choice) != "function":
                raise bad_request(f"tool_choice: there is no {agents.kind_of(choice)}; name a function", "tool_choice")
            choice = agents.named(choice)
        return self.chat(
            messages=_messages(self),
            tools=agents.functions(self.tools, "function"),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=agents.output_format(self.text.format),
            reasoning_effort=self.reasoning.effort,
            max_completion_tokens=self.max_output_tokens,
            chat_template_kwargs=self.chat_template_kwargs,
            logprobs=scored,
            top_logprobs=self.top_logprobs,
        )


def _messages(body: ResponsesRequest) -> list[Fields]:
    """Instructions and those that the input begins with become one message: many templates expect no more."""
    items = body.input if isinstance(body.input, list) else [{"role": "user", "content": body.input}]
    lead = [] if body.instructions is None else agents.listed(body.instructions)
    begin = 0
    while begin < len(items) and items[begin].get("role") in ("system", "developer"):
        lead = lead + agents.listed(items[begin].get("content"))
        begin += 1
    messages: list[Fields] = [{"role": "system", "content": lead}] if lead else []
    names = dict[str, str]()  # of the functions that calls are of
    for item in items[begin:]:
        kind = agents.kind_of(item, "message")
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": agents.listed(item.get("content"))})
        elif kind == "message":
            _turn(messages, "tool_calls", "content")["content"] = agents.listed(item.get("content"))
        elif kind == "function_call_output":
            [id] = agents.needed(item, "call_id")
            messages.append(agents.tool_result(id, agents.listed(item.get("output")), names))
        elif kind == "function_call":
            id, name, arguments = agents.needed(item, "call_id", "name", "arguments")
            names[id] = name
            _turn(messages).setdefault("tool_calls", []).append(agents.tool_call(id, name, arguments))
        elif kind == "reasoning":
            thoughts = agents.listed(item.get("content") or item.get("summary") or [])
            text = "".join(str(one.get("text", "")) for one in thoughts if isinstance(one, dict))
            _turn(messages, "tool_calls", "content", "reasoning_content")["reasoning_content"] = text
        else:
            raise bad_request(f"input: an item of type {kind} cannot be read: {NOT_STORED}, as messages", "input")
    return messages


def _turn(messages: list[Fields], *later: str) -> Fields:
    """The assistant's message that an item belongs to: reasoning, content and calls make one, in this order. later:
    what it cannot have yet."""
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].keys() & set(later):
        messages.append({"role": "assistant"})
    return messages[-1]
