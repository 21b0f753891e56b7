"""What completions and chat answers have in common: headings, usage, and when a stream reports it."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stridelm.engine.request_metrics import RequestMetrics
from stridelm.server.callers import caller_of
from stridelm.server.chunk import Chunk
from stridelm.server.engine_client import Prompt
from stridelm.server.errors import ApiError
from stridelm.server.gather import Gathered, gather
from stridelm.server.generation import Generation
from stridelm.server.openai.schemas import SamplingFields, StreamOptions
from stridelm.server.replies import Answer, event, listed, send, to_json, while_connected
from stridelm.server.service import Service
from stridelm.server.turns import Turn

ONLY_TIER = "default"
NO_CHOICES = b'"choices":[]'


def check_model(service: Service, name: str | None) -> None:
    """Raise ApiError if `name` is not one of the model's names."""
    if name is not None and name not in service.names:
        raise ApiError(
            404,
            f"this server has no model {name[:80]!r}; it serves {service.names[0]!r}",
            param="model",
            code="model_not_found",
        )


class Heading:
    """The fields at the head of an answer, and of each of its events."""

    def __init__(self, service: Service, prefix: str, object: str, asked: SamplingFields) -> None:
        self._fields: dict[str, Any] = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": object,
            "created": int(time.time()),
            "model": service.names[0],
        }
        self._tier = {} if asked.service_tier is None else {"service_tier": ONLY_TIER}
        before, after = event(self.around(choices=0)).split(b'"choices":0', 1)
        self._before, self._after = before + b'"choices":', after

    def around(self, **content: Any) -> dict[str, Any]:
        return {**self._fields, **content, **self._tier}

    def event(self, choices: list[dict[str, Any]], beside: Mapping[str, Any] | None = None) -> bytes:
        """A server-sent event. What all events of the answer have in common is encoded only once.

        beside: fields of this event, after its choices.
        """
        if not beside:
            return b"%b%b%b" % (self._before, to_json(choices), self._after)
        fields = to_json(beside)[1:-1]  # without its braces
        return b"%b%b,%b%b" % (self._before, to_json(choices), fields, self._after)


@dataclass
class Usage:
    """Tokens of one request: its prompts, each counted once however many samples it has, and its outputs.

    accepted: of the outputs, those that were drafted. rejected: drafted ones that the outputs do not have.
    reasoning: of the outputs, those before the answer; None if reasoning is not parsed.
    """

    prompt: int
    completion: int = 0
    cached: int = 0
    accepted: int = 0
    rejected: int = 0
    reasoning: int | None = None

    def as_json(self) -> dict[str, Any]:
        details = {"accepted_prediction_tokens": self.accepted, "rejected_prediction_tokens": self.rejected}
        if self.reasoning is not None:
            details["reasoning_tokens"] = self.reasoning
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": details,
        }


def metrics_of(metrics: RequestMetrics) -> dict[str, Any]:
    """An answer's `metrics` as a field of it; no field if nobody asked for them."""
    drafts = metrics.speculative_decoding
    return {} if drafts is None else {"metrics": {"speculative_decoding": drafts.as_json()}}


class StreamUsage:
    """Counts usage as output arrives. Of a stream: what its events have beside their choices, which is usage, and
    metrics with the last of it."""

    def __init__(self, request: SamplingFields, usage: Usage, samples: int, n: int) -> None:
        """samples: of all prompts. n: of each."""
        options = request.stream_options or StreamOptions()
        self.always = options.continuous_usage_stats
        """Whether every event has usage."""
        self._at_end = options.include_usage
        self._usage, self._n = usage, n
        self._single = samples == 1
        self._cached = dict[int, int]()
        """First sample of a prompt -> tokens of the prompt that came from the prefix cache."""
        self._accepted = dict[int, int]()
        """Unfinished sample -> its tokens that were drafted."""
        self.metrics: dict[str, Any] = {}
        """Of the sample, if there is a single one: as in vLLM, an answer with several has none."""

    def begin(self, index: int, chunk: Chunk) -> None:
        """A sample has output, which may not have been counted yet."""
        before = self._cached.get(index, 0)
        if index % self._n == 0 and chunk.cached_tokens > before:
            self._cached[index] = chunk.cached_tokens
            self._usage.cached += chunk.cached_tokens - before

    def take(self, index: int, chunk: Chunk) -> None:
        """Count a sample's output."""
        self.begin(index, chunk)
        self._usage.completion += len(chunk.token_ids)
        self._usage.accepted += chunk.accepted
        self._accepted[index] = self._accepted.get(index, 0) + chunk.accepted
        if chunk.finish is not None:
            self._usage.rejected += chunk.finish.metrics.drafted - self._accepted.pop(index)
            self.metrics = metrics_of(chunk.finish.metrics) if self._single else {}

    def with_choice(self) -> dict[str, Any]:
        """Fields of an event with a choice."""
        if not self.always:
            return {}
        usage = {"usage": self._usage.as_json()}
        return usage if self._at_end else usage | self.metrics

    def last(self) -> dict[str, Any]:
        """Fields of the event after all choices; empty if there is to be none."""
        return {"usage": self._usage.as_json(), **self.metrics} if self._at_end else {}


class Choices(Answer):
    """An answer of a choice for each sample. Its events: opening ones, one for each chunk, and what comes beside the
    choices."""

    def __init__(
        self, service: Service, asked: SamplingFields, heading: Heading, prompts: Sequence[array[int]], n: int
    ) -> None:
        """n: samples of each prompt."""
        self._service, self._heading, self._prompts, self._n = service, heading, prompts, n
        self._usage = Usage(sum(map(len, prompts)))
        self._beside = StreamUsage(asked, self._usage, len(prompts) * n, n)
        self._opened = False

    def counted(self, chunk: Chunk) -> Chunk:
        """What of a sample's output is part of the answer."""
        return chunk

    @abstractmethod
    async def choice(self, index: int, sample: Gathered, turn: Turn) -> dict[str, Any]:
        """The choice of one sample."""

    @abstractmethod
    def opening_choices(self) -> Iterable[dict[str, Any]]:
        """The choices of the events before any output."""

    @abstractmethod
    def chunk_choices(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """What a sample's output adds to its choice, for an event each."""

    async def whole(self, generation: Generation) -> list[bytes]:
        """Encoded choice by choice."""
        samples = await gather(generation)
        choices = []
        async with self._service.turns(generation.tenant) as turn:
            for index, sample in enumerate(samples):
                choices.append(to_json(await self.choice(index, sample, turn)))
                self._beside.take(index, self.counted(sample.summed))
                sample.forget()
                await turn.breathe()
        whole = self._heading.around(choices=[], usage=self._usage.as_json(), **self._beside.metrics)
        before, after = to_json(whole).split(NO_CHOICES, 1)
        return [before + b'"choices":', *listed(choices), after]

    def opening(self) -> bytes:
        """Empty if the events are to have usage, which is known when the first output arrives."""
        return b"" if self._beside.always else self._open()

    def events(self, arrived: Sequence[tuple[int, Chunk]]) -> bytes:
        arrived, events = [(index, self.counted(chunk)) for index, chunk in arrived], list[bytes]()
        if not self._opened:
            for index, chunk in arrived:
                self._beside.begin(index, chunk)
            events.append(self._open())
        for index, chunk in arrived:
            self._beside.take(index, chunk)
            events += map(self._event, self.chunk_choices(index, chunk))
        return b"".join(events)

    def closing(self) -> bytes:
        last = self._beside.last()
        return self._heading.event([], last) if last else b""

    def _open(self) -> bytes:
        self._opened = True
        return b"".join(map(self._event, self.opening_choices()))

    def _event(self, choice: dict[str, Any]) -> bytes:
        return self._heading.event([choice], self._beside.with_choice())


async def reply(request: Request, prompts: Sequence[Prompt], answer: Answer, stream: bool | None) -> Response:
    """Complete the prompts and send the answer. Raises ApiError if they cannot be served."""
    service: Service = request.app.state.service
    starting = service.generate(prompts, caller_of(request))
    request.state.generation = generation = await while_connected(request, starting)
    return await send(request, generation, answer, stream)
