"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.chat.parser import MessageParser
from stridelm.chat.parts import Part
from stridelm.params import SamplingParams
from stridelm.server.callers import caller_of
from stridelm.server.chunk import Chunk
from stridelm.server.errors import bad_request
from stridelm.server.gather import Gathered, speculation_of
from stridelm.server.large import LargeBodies
from stridelm.server.messages import Finish, Score, Scores, span_of, top_scores
from stridelm.server.openai.completions import finite
from stridelm.server.openai.conversation import conversation_ids
from stridelm.server.openai.schemas import ChatRequest
from stridelm.server.openai.shared import Choices, Heading, check_model, reply
from stridelm.server.openai.tools import MessageReading, callable_tools, message_of, message_reading, parts_of
from stridelm.server.replies import to_json, while_connected
from stridelm.server.service import Service
from stridelm.server.turns import Turn
from stridelm.text.tokenizer import Tokenizer

router = APIRouter(route_class=LargeBodies)


@router.post("/v1/chat/completions", response_model=None)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, through the model's chat template."""
    reading = await prepare(body, request)
    return await reply(request, [reading.prompt], _Answer(request.app.state.service, body, reading), body.stream)


async def prepare(body: ChatRequest, request: Request) -> MessageReading:
    """Raises ApiError for what cannot be served."""
    service: Service = request.app.state.service
    check_model(service, body.model)
    params = chat_params(body, service)
    tools = callable_tools(body, service.chat)
    with service.entering(params.n, caller_of(request)):
        ids = await while_connected(request, conversation_ids(body, request))
    return message_reading(body, service.chat, tools, ids, params)


def chat_params(body: ChatRequest, service: Service) -> SamplingParams:
    """Raises ApiError for parameters that cannot be served."""
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs would have no effect without logprobs; set logprobs too", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request("max_tokens is the old name of max_completion_tokens; give only one", "max_tokens")
    if body.prompt_logprobs is not None:
        raise bad_request("chat answers have no prompt_logprobs; use /v1/completions", "prompt_logprobs")
    more: dict[str, Any] = {"max_tokens": body.max_completion_tokens or body.max_tokens}
    if body.max_tokens == 0:
        raise bad_request("max_tokens must be at least 1; raise it", "max_tokens")
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    return body.sampling(service.defaults, **more)


class _Answer(Choices):
    def __init__(self, service: Service, body: ChatRequest, reading: MessageReading) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        prompt = reading.prompt
        super().__init__(service, body, Heading(service, "chatcmpl", kind, body), [prompt.ids], prompt.params.n)
        self._body = body
        self._parsers = [None if reading.parser is None else reading.parser() for _ in range(self._n)]
        """Of each sample's message."""
        self._beside_text = body.logprobs or body.return_token_ids or self._beside.always
        """Whether every chunk is reported, with or without text."""

    def opening_choices(self) -> Iterator[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        return ({"index": index, "delta": first, "finish_reason": None} for index in range(self._n))

    def chunk_choices(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        finish, parser = chunk.finish, self._parsers[index]
        delta = {"content": chunk.text}
        if parser is not None:
            delta = message_of(parts_of(parser, chunk), self._body.include_reasoning is not False, streamed=True)
            self._usage.reasoning = self._reasoning_tokens()
            if not delta and not self._beside_text and finish is None:
                return []  # it is not known yet what the text is part of
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
        scores = self._body.logprobs and chunk.logprobs is not None
        choice["logprobs"] = {"content": self._scored(chunk)} if scores else None
        if self._body.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        if finish is None:
            return [choice]
        choices = [choice]
        if "tool_calls" in delta:  # openai's stream helpers finish a call at an event after the call's own
            choices.append({"index": index, "delta": {}})
        choices[-1] |= {"finish_reason": _reason(finish, parser), "stop_reason": finish.stop_reason}
        choices[-1]["speculation"] = speculation_of(finish.metrics)
        return choices

    async def choice(self, index: int, sample: Gathered, turn: Turn) -> dict[str, Any]:
        parser, content, parts = self._parsers[index], list[msgspec.Raw](), list[Part]()
        async for chunk in sample.again(turn):
            content += self._scored(chunk)
            parts += parts_of(parser, chunk)
        self._usage.reasoning = self._reasoning_tokens()
        message = message_of(parts, self._body.include_reasoning is not False, streamed=False)
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", **message},
            "logprobs": {"content": content} if self._body.logprobs else None,
            "finish_reason": _reason(sample.ended, parser),
            "stop_reason": sample.ended.stop_reason,
            "speculation": speculation_of(sample.ended.metrics),
        }
        if self._body.return_token_ids:
            choice["token_ids"], choice["prompt_token_ids"] = sample.token_ids, self._prompts[0].tolist()
        return choice

    def _reasoning_tokens(self) -> int | None:
        """None if nobody looks for reasoning."""
        counts = [parser.reasoning_tokens for parser in self._parsers if parser is not None and parser.finds_reasoning]
        return sum(counts) if counts else None

    def _scored(self, chunk: Chunk) -> list[msgspec.Raw]:
        return scored(chunk, self._body.top_logprobs or 0, self._service.tokenizer) if self._body.logprobs else []


def scored(chunk: Chunk, top: int, tokenizer: Tokenizer) -> list[msgspec.Raw]:
    """Its log-probabilities as JSON: an entry per position, with the `top` likeliest tokens."""

    def alternatives(entry: Scores) -> list[dict[str, Any]]:
        return [_entry(one, tokenizer.token_bytes(one.token)) for one in top_scores(entry, top)]

    entries = chunk.logprobs or ()
    own = ({**_entry(one[0], span_of(one).data), "top_logprobs": alternatives(one)} for one in entries)
    return [msgspec.Raw(to_json(entry)) for entry in own]


def _reason(finish: Finish, parser: MessageParser | None) -> str:
    """Why a message ended; with calls, that it waits for their results."""
    return "tool_calls" if finish.reason == "stop" and parser is not None and parser.calls else finish.reason


def _entry(score: Score, data: bytes) -> dict[str, Any]:
    return {"token": score.text, "logprob": finite(score.logprob), "bytes": list(data)}
