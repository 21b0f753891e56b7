"""Answers of agents' APIs: one message in blocks (reasoning, content, calls), whole or as a stream of named events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stridelm.chat.parts import Part, Text, ToolCall
from stridelm.server.callers import caller_of
from stridelm.server.chunk import Chunk
from stridelm.server.engine_client import Prompt
from stridelm.server.errors import ApiError
from stridelm.server.gather import gather, speculation_of
from stridelm.server.generation import Generation
from stridelm.server.messages import SCORED, Finish
from stridelm.server.openai.shared import Usage, metrics_of
from stridelm.server.openai.tools import MessageReading
from stridelm.server.replies import EventStream, json_reply, named_event, while_connected
from stridelm.server.service import Service

Event = dict[str, Any]
"""As JSON; its `type` is its name."""


class MessageAnswer(ABC):
    """The whole answer is what the events lead to: both are made in the same way."""

    keeps = True
    """Blocks are kept until the answer is complete."""

    def __init__(self, prompt: array[int], reading: MessageReading, reasoning: bool = True) -> None:
        """reasoning: whether the answer has any that the message has."""
        self.usage, self.params = Usage(len(prompt), reasoning=0), reading.params
        self.message: dict[str, Any] = {}
        """The answer, once its output has ended."""
        self.blocks: list[dict[str, Any]] = []
        """Those that have ended."""
        self.kind, self.call = "", ToolCall(0, "", "", "")
        """Of the block that is open: reasoning, content or call; the last call."""
        self.parser = None if reading.parser is None else reading.parser()
        self._reasoning, self._texts = reasoning, list[str]()

    @abstractmethod
    def begin(self) -> list[Event]: ...

    @abstractmethod
    def more(self, text: str) -> Event:
        """text: a call's is its arguments."""

    @abstractmethod
    def end(self, text: str, cut: bool) -> list[Event]:
        """Moves a block to `blocks`. cut: the output ended within it."""

    @abstractmethod
    def finish(self, finish: Finish) -> list[Event]:
        """The last events. Sets `message`."""

    @abstractmethod
    def failure(self, error: ApiError) -> Event: ...

    def opening(self) -> bytes:
        return b""

    def events(self, arrived: Sequence[tuple[int, Chunk]]) -> bytes:
        return encoded([event for _, chunk in arrived for event in self.take(chunk)])

    def closing(self) -> bytes:
        return b""

    def take(self, chunk: Chunk) -> list[Event]:
        """The events of more output."""
        events, finish = list[Event](), chunk.finish
        self.usage.cached = max(self.usage.cached, chunk.cached_tokens)
        self.usage.completion += len(chunk.token_ids)
        for part in self._parts(chunk):
            kind, text = ("call", part.arguments) if isinstance(part, ToolCall) else (part.field, part.text)
            if kind == "reasoning" and not self._reasoning:
                continue
            if isinstance(part, ToolCall) or kind != self.kind:
                events += self._end()
                self.kind, self.call = kind, part if isinstance(part, ToolCall) else self.call
                events += self.begin()
            self._texts.append(text)
            events.append(self.more(text))
            events += self._end() if isinstance(part, ToolCall) else []
        return events if finish is None else [*events, *self._end(finish.reason != "stop"), *self.finish(finish)]

    def _parts(self, chunk: Chunk) -> Sequence[Part]:
        if self.parser is None:
            return [Text("content", chunk.text)] if chunk.text else []
        parts = self.parser.feed(chunk.pieces) + (self.parser.finish() if chunk.finish is not None else [])
        self.usage.reasoning = self.parser.reasoning_tokens
        return parts

    def _end(self, cut: bool = False) -> list[Event]:
        events = self.end("".join(self._texts), cut) if self.kind else []
        self.kind, self._texts = "", []
        return events


def encoded(events: Sequence[Event]) -> bytes:
    return b"".join(named_event(event["type"], event) for event in events)


def drafted(finish: Finish) -> dict[str, Any]:
    """How a message was drafted, as in chat's answers."""
    return {"speculation": speculation_of(finish.metrics), **metrics_of([finish.metrics])}


async def send(
    request: Request, prompt: array[int], reading: MessageReading, answer: MessageAnswer, stream: bool | None
) -> Response:
    """Generate a message and send it. Raises ApiError if it cannot be served."""
    service: Service = request.app.state.service
    starting = service.generate([Prompt(prompt, reading.params, kept=reading.kept)], caller_of(request))
    request.state.generation = generation = await while_connected(request, starting)
    close = partial(service.engine_client.abandon, generation)
    if stream:
        return EventStream(generation, answer, close, lambda error: encoded([answer.failure(error)]), end=b"")
    return json_reply(await while_connected(request, _whole(service, generation, answer), close))


async def _whole(service: Service, generation: Generation, answer: MessageAnswer) -> dict[str, Any]:
    [sample] = await gather(generation)
    async with service.turns(generation.tenant) as turn:
        for begin in range(0, len(sample.token_ids), SCORED):
            place = slice(begin, begin + SCORED)
            answer.take(Chunk(sample.token_ids[place], list(sample.pieces[place]), logprobs=sample.logprobs[place]))
            await turn.breathe()
        answer.take(Chunk(finish=sample.ended, cached_tokens=sample.ended.metrics.cached_tokens))
    return answer.message
