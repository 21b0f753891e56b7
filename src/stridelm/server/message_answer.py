"""Answers of agents' APIs: one message in blocks (reasoning, content, calls), whole or as a stream of named events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from stridelm.chat.parts import ToolCall
from stridelm.server.chunk import Chunk
from stridelm.server.gather import gather, speculation_of
from stridelm.server.generation import Generation
from stridelm.server.messages import Finish
from stridelm.server.openai.shared import Usage, metrics_of
from stridelm.server.openai.tools import MessageReading, parts_of
from stridelm.server.replies import Answer, named_event, to_json
from stridelm.server.service import Service

Event = dict[str, Any]
"""As JSON; its `type` is its name."""


class MessageAnswer(Answer):
    """The whole answer is what the events lead to: both are made in the same way. reasoning: whether it has any that
    the message has."""

    keeps = True  # blocks, until the answer is complete
    tail = b""

    def __init__(self, service: Service, reading: MessageReading, reasoning: bool = True) -> None:
        self.service = service
        self.usage, self.params = Usage(len(reading.prompt.ids), reasoning=0), reading.prompt.params
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

    async def whole(self, generation: Generation) -> list[bytes]:
        [sample] = await gather(generation)
        async with self.service.turns(generation.tenant) as turn:
            async for chunk in sample.again(turn):
                self.take(chunk)
        return [to_json(self.message)]

    def events(self, arrived: Sequence[tuple[int, Chunk]]) -> bytes:
        return encoded([event for _, chunk in arrived for event in self.take(chunk)])

    def take(self, chunk: Chunk) -> list[Event]:
        """The events of more output."""
        events, finish = list[Event](), chunk.finish
        self.usage.cached = max(self.usage.cached, chunk.cached_tokens)
        self.usage.completion += len(chunk.token_ids)
        for part in parts_of(self.parser, chunk):
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
        self.usage.reasoning = 0 if self.parser is None else self.parser.reasoning_tokens
        return events if finish is None else [*events, *self._end(finish.reason != "stop"), *self.finish(finish)]

    def _end(self, cut: bool = False) -> list[Event]:
        events = self.end("".join(self._texts), cut) if self.kind else []
        self.kind, self._texts = "", []
        return events


def encoded(events: Sequence[Event]) -> bytes:
    return b"".join(named_event(event["type"], event) for event in events)


def drafted(finish: Finish) -> dict[str, Any]:
    """How a message was drafted, as in chat's answers."""
    return {"speculation": speculation_of(finish.metrics), **metrics_of(finish.metrics)}
