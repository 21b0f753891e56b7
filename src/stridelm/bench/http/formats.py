"""Requests and answers of the APIs that servers of models have: OpenAI's completions and chats, SGLang's /generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Event = tuple[float, dict[str, Any]]
"""When it arrived, and its JSON."""


@dataclass
class Answered:
    """One answer. at: when its events with tokens arrived. tokens: of the output."""

    at: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    speculation: dict[str, Any] = field(default_factory=dict)
    """As a Stride server reports it: drafter, depth, acceptance, lossless, simulated."""


@dataclass(frozen=True)
class Wanted:
    """One request, whatever the API. messages: (role, content). extra: of Stride's or vLLM's own parameters."""

    model: str
    messages: Sequence[tuple[str, str]]
    text: str
    """The messages as one text, for an API without roles."""
    max_tokens: int
    temperature: float
    ignore_eos: bool
    seed: int
    speculation: Any = None
    ids: bool = False
    """Whether the server is known to return token ids if asked."""


class Format(Protocol):
    @property
    def route(self) -> str: ...

    def body(self, wanted: Wanted) -> dict[str, Any]:
        """The JSON of a streamed request."""

    def read(self, events: Sequence[Event]) -> Answered:
        """Raises ValueError for an answer that is an error or has no tokens."""


class Completions:
    """OpenAI's /v1/completions."""

    route = "/v1/completions"

    def body(self, wanted: Wanted) -> dict[str, Any]:
        return {"prompt": wanted.text, **_openai(wanted)}

    def read(self, events: Sequence[Event]) -> Answered:
        return _read_openai(events, lambda choice: choice.get("text"))


class Chat:
    """OpenAI's /v1/chat/completions."""

    route = "/v1/chat/completions"

    def body(self, wanted: Wanted) -> dict[str, Any]:
        messages = [{"role": role, "content": content} for role, content in wanted.messages]
        return {"messages": messages, **_openai(wanted)}

    def read(self, events: Sequence[Event]) -> Answered:
        return _read_openai(events, lambda choice: (choice.get("delta") or {}).get("content"))


class Generate:
    """SGLang's /generate."""

    route = "/generate"

    def body(self, wanted: Wanted) -> dict[str, Any]:
        sampling: dict[str, Any] = {"max_new_tokens": wanted.max_tokens, "temperature": wanted.temperature}
        sampling |= {"ignore_eos": True} if wanted.ignore_eos else {}
        sampling |= {"sampling_seed": wanted.seed} if wanted.temperature > 0 else {}
        sampling |= {} if wanted.speculation is None else {"speculation": wanted.speculation}
        return {"text": wanted.text, "sampling_params": sampling, "stream": True}

    def read(self, events: Sequence[Event]) -> Answered:
        answered, ids = Answered(), list[int]()
        for when, event in events:
            _check(event)
            meta, new = event["meta_info"], event.get("output_ids")
            if meta["completion_tokens"] > answered.tokens:
                answered.at.append(when)
            answered.tokens, answered.prompt_tokens = meta["completion_tokens"], meta["prompt_tokens"]
            whole = new is None or len(new) == answered.tokens
            answered.text = event["text"] if whole else answered.text + event["text"]
            ids = (new or []) if whole else ids + (new or [])
            if meta.get("finish_reason") is not None:
                answered.finish_reason = meta["finish_reason"]["type"]
                answered.steps = meta.get("spec_verify_ct")
                answered.drafted, answered.accepted = (
                    meta.get(name) for name in ("spec_num_proposed_drafts", "spec_num_correct_drafts")
                )
                answered.speculation = {name: meta[name] for name in ("drafter", "lossless") if name in meta}
                if meta.get("drafter") == "none":
                    answered.steps = answered.tokens
        answered.token_ids = ids if len(ids) == answered.tokens else None
        return _whole(answered)


FORMATS: dict[str, Format] = {"openai": Completions(), "openai-chat": Chat(), "sglang": Generate()}
"""By the names of `vllm bench serve` and SGLang's benchmark."""


def _openai(wanted: Wanted) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": wanted.model,
        "max_tokens": wanted.max_tokens,
        "temperature": wanted.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {"ignore_eos": True} if wanted.ignore_eos else {}
    body |= {"seed": wanted.seed} if wanted.temperature > 0 else {}
    body |= {"return_token_ids": True} if wanted.ids else {}
    return body if wanted.speculation is None else {**body, "speculation": wanted.speculation}


def _read_openai(events: Sequence[Event], text_of: Any) -> Answered:
    """text_of: from a choice to the text that is new in it; None: the choice has no token."""
    answered, ids, told = Answered(), list[int](), False
    for when, event in events:
        _check(event)
        usage = event.get("usage")
        if usage:
            answered.tokens, answered.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        for choice in event.get("choices") or ():
            text, new, finish = text_of(choice), choice.get("token_ids"), choice.get("finish_reason")
            opening = "role" in (choice.get("delta") or {}) and not text  # of a chat, sent before any token
            # A token may have no text yet. The last event may have a finish reason alone.
            if new or text or (new is None and text is not None and finish is None and not opening):
                answered.at.append(when)
            answered.text += text or ""
            ids, told = ids + (new or []), told or new is not None
            answered.finish_reason = finish or answered.finish_reason
            if isinstance(choice.get("speculation"), dict):
                answered.speculation = choice["speculation"]
                answered.steps, answered.drafted, answered.accepted = (
                    answered.speculation.get(name) for name in ("steps", "drafted", "accepted")
                )
    answered.token_ids = ids if told and len(ids) == answered.tokens else None
    return _whole(answered)


def _check(event: dict[str, Any]) -> None:
    """Raise ValueError for an event that is an error."""
    if "error" in event:
        raise ValueError(f"the server ended the stream with an error: {event['error']}")


def _whole(answered: Answered) -> Answered:
    if not answered.at or not answered.tokens:
        raise ValueError("the stream has no tokens, or does not say how many in its usage; does the server stream it?")
    return answered
