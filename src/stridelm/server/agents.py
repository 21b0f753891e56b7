"""What requests of agents' APIs have in common: they become requests of chat."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError

from stridelm.server.errors import bad_request
from stridelm.server.openai.inert import by_name
from stridelm.server.openai.schemas import MAX_WORDS, ChatRequest, SamplingFields
from stridelm.server.validation import invalid

REFUSED = by_name(
    {
        "n best_of": ("an answer is one message; send the request several times", 1),
        "max_completion_tokens response_format reasoning_effort": ("that is chat's name; use this API's own",),
        "stream_options": ("usage is in the last events; leave it out", {}, {"include_obfuscation": False}),
        "return_token_ids": ("answers have only text here; use /v1/chat/completions", False),
    }
)
"""Parameters of chat that these APIs refuse, as in openai/inert.py."""
TOOL_FIELDS = ("name", "description", "parameters", "strict")
LONGEST_KIND = 64


class AgentRequest(SamplingFields, ABC):
    """stubs: in place of what is large and has been read into a prompt, besides the fields below."""

    stubs: ClassVar[dict[str, Any]]

    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_WORDS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @abstractmethod
    def as_chat(self) -> ChatRequest:
        """Raises ApiError for what chat refuses, and for options without effect."""

    def chat(self, **translated: Any) -> ChatRequest:
        """Its own parameters that chat has, and translated ones; None is absent."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields} | translated
        try:
            return ChatRequest.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise invalid(error.errors(include_url=False, include_input=False, include_context=False)) from error


def needed(item: dict[str, Any], *names: str) -> list[str]:
    """Texts that an object of the conversation must have. Raises ApiError if one is missing."""
    for name in names:
        if not isinstance(item.get(name), str):
            raise bad_request(f"{kind_of(item)}: {name} is missing, or is not a text", name)
    return [item[name] for name in names]


def kind_of(item: Any, default: str = "") -> str:
    """An object's type, short enough for an error."""
    return str((item.get("type") if isinstance(item, dict) else None) or default)[:LONGEST_KIND]


def listed(content: Any) -> list[Any]:
    """Content as parts. Those that are not texts are refused where the chat template is rendered."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(id: str, content: list[Any], names: dict[str, str]) -> dict[str, Any]:
    """names: of the functions, by calls' ids; some templates need them."""
    named = {"name": names[id]} if id in names else {}
    return {"role": "tool", "tool_call_id": id, "content": content, **named}


def functions(tools: list[dict[str, Any]] | None, kind: str) -> list[dict[str, Any]] | None:
    """Tools in chat's form. kind: the type that they must have. Raises ApiError for others."""
    for tool in tools or ():
        if kind_of(tool, kind) != kind:
            raise bad_request(f"tools: the server has no {kind_of(tool)}; give the model functions to call", "tools")
    given = [{name: tool[name] for name in TOOL_FIELDS if tool.get(name) is not None} for tool in tools or ()]
    return [{"type": "function", "function": one} for one in given] or None


def named(choice: Any) -> dict[str, Any]:
    """A choice of one function in chat's form, which checks it."""
    return {"type": "function", "function": {"name": choice.get("name") if isinstance(choice, dict) else choice}}


def output_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """A flat format in chat's form, which checks it."""
    schema = {name: value for name, value in (form or {}).items() if name != "type"}
    return None if form is None else {"type": form.get("type")} | ({"json_schema": schema} if schema else {})
