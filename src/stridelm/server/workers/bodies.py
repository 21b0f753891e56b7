"""Reading a large body, in a worker: JSON, its validation, the chat template and the tokenizer hold Python for longer
than a loop may.

What comes of it is small, or packed: the body with stubs for its prompts, and their token ids.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from stridelm.server.errors import ApiError, bad_request
from stridelm.server.openai.completions import asked_prompts
from stridelm.server.openai.conversation import conversation_text
from stridelm.server.openai.schemas import ChatRequest, CompletionRequest
from stridelm.server.prompts import PromptReader
from stridelm.server.replies import to_json
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
"""More than any request has; with more, some are unknown."""
MAX_BESIDE = 256 << 10
"""Bytes of a body beside its prompts: its parameters, stop strings, grammar."""
MAX_REPLY = 16 << 20
"""Bytes of an answer that a worker makes."""
CONVERSATION: dict[str, Any] = {"messages": [{"role": "user"}], "tools": None, "chat_template_kwargs": None}
"""Stubs of one."""


def prepare(opening: bytes) -> Work:
    """A piece of work is a route, an end of line and a body; what comes of it is a Read."""
    given = msgspec.json.decode(opening, type=Opening)
    tokenizer = Tokenizer.load(Path(given.model))
    if given.chat_template is not None:
        tokenizer.hf.chat_template = given.chat_template
    reader = PromptReader(tokenizer, given.context, given.vocab_size, given.token_bytes)

    def work(task: bytes) -> bytes:
        route, _, body = task.partition(b"\n")
        try:
            found = _read(route.decode(), body, reader)
        except ApiError as error:
            said = error.body["error"]
            found = Read(error=(error.status, said["message"], said["param"]))
        return encode(found)

    return work


def _read(route: str, text: bytes, reader: PromptReader) -> Read:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise invalid([{"loc": ("body", error.pos), "msg": "JSON decode error"}]) from error
    except (ValueError, RecursionError) as error:
        raise bad_request("There was an error parsing the body") from error
    if isinstance(data, dict) and len(data) > MAX_KEYS:
        raise bad_request(f"the body has {len(data)} keys, and no request has more than {MAX_KEYS}; leave some out")
    form, read = FORMS[route]
    try:
        body = form.validate_python(data)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False, include_context=False)) from error
    changed, found = read(body, reader)
    found.rest = json.dumps({**data, **changed}).encode()
    if found.reply is not None and len(found.reply) > MAX_REPLY:
        raise bad_request(
            f"the answer would have {len(found.reply)} bytes, more than {MAX_REPLY}; ask for less at once"
        )
    if len(found.rest) > MAX_BESIDE:
        raise bad_request(
            f"the body has {len(found.rest)} bytes beside its prompts, more than {MAX_BESIDE}; make its parameters "
            "simpler"
        )
    return found


# What is read of each route's body: stubs for what is large, and what it came to


def _completions(body: CompletionRequest, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    ids = reader.read(asked_prompts(body), body.add_special_tokens is not False, "prompt")
    return {"prompt": _stub(body.prompt)}, _packed(ids)


def _generate(body: GenerateRequest, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    ids = reader.read(native_prompts(body), True, "text")
    return {"text": _stub(body.text), "input_ids": _stub(body.input_ids)}, _packed(ids)


def _chat(body: ChatRequest, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    ids = reader.read([conversation_text(body, reader.tokenizer)], body.add_special_tokens, "messages")
    return CONVERSATION, _packed(ids)


def _tokenize(body: TokenizeRequest | TokenizeConversation, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    stubs = CONVERSATION if isinstance(body, TokenizeConversation) else {"prompt": ""}
    return stubs, Read(reply=to_json(told_tokens(body, reader)))


def _detokenize(body: DetokenizeRequest, reader: PromptReader) -> tuple[dict[str, Any], Read]:
    return {"tokens": []}, Read(reply=to_json(told_texts(body, reader)))


def _as_it_is(_: Any, __: PromptReader) -> tuple[dict[str, Any], Read]:
    return {}, Read()


def _stub(prompt: Any) -> Any:
    """As many prompts of the same form, with nothing in them."""
    if isinstance(prompt, str):
        return ""
    if isinstance(prompt, list):
        return [0] if isinstance(prompt[0], int) else [_stub(one) for one in prompt]
    return None


def _packed(prompts: list[array[int]]) -> Read:
    return Read(prompts=[ids.tobytes() for ids in prompts])


Reading = Callable[[Any, PromptReader], tuple[dict[str, Any], Read]]
FORMS: dict[str, tuple[TypeAdapter[Any], Reading]] = {
    "/v1/completions": (TypeAdapter(CompletionRequest), _completions),
    "/v1/chat/completions": (TypeAdapter(ChatRequest), _chat),
    "/generate": (TypeAdapter(GenerateRequest), _generate),
    "/abort_request": (TypeAdapter(AbortRequest), _as_it_is),
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), (TypeAdapter(Tokenize), _tokenize)),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), (TypeAdapter(DetokenizeRequest), _detokenize)),
}
"""Route -> what its body must be, and what is read of it. Every route with a body is here."""
