"""Reads a large body in a worker: JSON parsing, validation, the chat template and the tokenizer hold the interpreter's
lock for longer than the event loop can be kept waiting.

The result is small, or packed: the body with stubs in place of its prompts, and the prompts' token ids.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from stridelm.server.agents import AgentRequest
from stridelm.server.anthropic.route import counted
from stridelm.server.anthropic.schemas import CountRequest, MessagesRequest
from stridelm.server.body import parsed
from stridelm.server.errors import ApiError, bad_request
from stridelm.server.openai.completions import asked_prompts
from stridelm.server.openai.conversation import conversation_text
from stridelm.server.openai.schemas import ChatRequest, CompletionRequest
from stridelm.server.prompts import PromptReader
from stridelm.server.replies import to_json
from stridelm.server.responses.schemas import ResponsesRequest
from stridelm.server.sglang.generate import asked_prompts as native_prompts
from stridelm.server.sglang.schemas import (
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    Tokenize,
    TokenizeConversation,
    TokenizeRequest,
)
from stridelm.server.sglang.texts import told_texts, told_tokens
from stridelm.server.validation import invalid
from stridelm.server.workers.nursery import Work
from stridelm.server.workers.wire import Opening, Read, encode
from stridelm.text.tokenizer import Tokenizer

MAX_KEYS = 256
"""More than any request has: a body with more has unknown ones."""
MAX_REST = 256 << 10
"""Bytes of a body without its prompts: its parameters, stop strings, grammar."""
MAX_REPLY = 16 << 20
"""Maximum bytes of an answer that a worker makes."""
CONVERSATION: dict[str, Any] = {"messages": [{"role": "user"}], "chat_template_kwargs": None}
"""Stubs of a conversation."""


def prepare(opening: bytes) -> Work:
    """A task is a route, a newline and a body; the result is an encoded Read."""
    setup = msgspec.json.decode(opening, type=Opening)
    tokenizer = Tokenizer.load(Path(setup.model))
    if setup.chat_template is not None:
        tokenizer.hf.chat_template = setup.chat_template
    reader = PromptReader(tokenizer, setup.context, setup.vocab_size, setup.token_bytes)

    def work(task: bytes) -> bytes:
        route, _, body = task.partition(b"\n")
        try:
            result = _read(route.decode(), body, reader)
        except ApiError as error:
            fields = error.body["error"]
            result = Read(error=(error.status, fields["message"], fields["param"]))
        return encode(result)

    return work


def _read(route: str, text: bytes, reader: PromptReader) -> Read:
    try:
        data = parsed(text)
    except json.JSONDecodeError as error:
        raise invalid([{"loc": ("body", error.pos), "msg": "JSON decode error"}]) from error
    except ValueError as error:
        raise bad_request("There was an error parsing the body") from error
    if isinstance(data, dict) and len(data) > MAX_KEYS:
        raise bad_request(f"the body has {len(data)} keys, more than the maximum of {MAX_KEYS}; leave some out")
    form, read = FORMS[route]
    try:
        body = form.validate_python(data)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False, include_context=False)) from error
    stubs, result = read(body, reader)
    result.rest = json.dumps({**data, **stubs}).encode()
    if result.reply is not None and len(result.reply) > MAX_REPLY:
        raise bad_request(
            f"the answer would have {len(result.reply)} bytes, more than {MAX_REPLY}; ask for less at once"
        )
    if len(result.rest) > MAX_REST:
        raise bad_request(
            f"the body without its prompts has {len(result.rest)} bytes, more than {MAX_REST}; make its parameters "
            "simpler"
        )
    return result


# For each route: the stubs that replace the body's large fields, and what was read from them


def _completions(body: CompletionRequest, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    ids = reader.read(asked_prompts(body), body.add_special_tokens is not False, "prompt")
    return {"prompt": _stub(body.prompt)}, _packed(ids)


def _generate(body: GenerateRequest, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    ids = reader.read(native_prompts(body), True, "text")
    return {"text": _stub(body.text), "input_ids": _stub(body.input_ids)}, _packed(ids)


def _chat(body: ChatRequest, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    ids = reader.read([conversation_text(body, reader.tokenizer)], body.add_special_tokens, "messages")
    return {**CONVERSATION, "tools": _undescribed(body.tools)}, _packed(ids)


def _agent(body: AgentRequest, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    _, result = _chat(body.as_chat(), reader)
    return {**body.stubs, "chat_template_kwargs": None, "tools": _undescribed(body.tools)}, result


def _count(body: CountRequest, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    return {**body.stubs, "chat_template_kwargs": None, "tools": None}, Read(reply=to_json(counted(body, reader)))


def _tokenize(body: TokenizeRequest | TokenizeConversation, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    stubs = {**CONVERSATION, "tools": None} if isinstance(body, TokenizeConversation) else {"prompt": ""}
    return stubs, Read(reply=to_json(told_tokens(body, reader)))


def _detokenize(body: DetokenizeRequest, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    return {"tokens": []}, Read(reply=to_json(told_texts(body, reader)))


def _as_it_is(_: Any, __: PromptReader) -> tuple[dict[str, Any], Read]:
    return {}, Read()


def _undescribed(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools, which are functions or have them, without what only the model reads: calls are found by the rest."""

    def rest(tool: dict[str, Any]) -> dict[str, Any]:
        kept = {key: one for key, one in tool.items() if key != "description"}
        return {key: rest(one) if key == "function" and isinstance(one, dict) else one for key, one in kept.items()}

    return None if tools is None else [rest(tool) for tool in tools]


def _stub(prompt: Any) -> Any:
    """The same number of prompts in the same form, but empty."""
    if isinstance(prompt, str):
        return ""
    if isinstance(prompt, list):
        return [0] if isinstance(prompt[0], int) else [_stub(one) for one in prompt]
    return None


def _packed(prompts: list[array[int]]) -> Read:
    return Read(prompts=[ids.tobytes() for ids in prompts])


Reading = Callable[[Any, PromptReader], tuple[dict[str, Any], Read]]
FORMS: dict[str, tuple[TypeAdapter[Any], Reading]] = {
    **dict.fromkeys(("/v1/completions", "/v1/completions/render"), (TypeAdapter(CompletionRequest), _completions)),
    **dict.fromkeys(("/v1/chat/completions", "/v1/chat/completions/render"), (TypeAdapter(ChatRequest), _chat)),
    "/v1/responses": (TypeAdapter(ResponsesRequest), _agent),
    **dict.fromkeys(("/v1/messages", "/v1/messages/render"), (TypeAdapter(MessagesRequest), _agent)),
    "/v1/messages/count_tokens": (TypeAdapter(CountRequest), _count),
    "/generate": (TypeAdapter(GenerateRequest), _generate),
    "/abort_request": (TypeAdapter(AbortRequest), _as_it_is),
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), (TypeAdapter(Tokenize), _tokenize)),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), (TypeAdapter(DetokenizeRequest), _detokenize)),
}
"""Route -> the type of its body, and the function that reads it. Contains every route with a body."""
