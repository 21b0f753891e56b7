"""Accumulates the output of a sample."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stridelm.engine.request_metrics import RequestMetrics
from stridelm.server.chunk import Chunk
from stridelm.server.generation import Generation
from stridelm.server.messages import SCORED, Finish, Scores
from stridelm.server.turns import Turn


@dataclass
class Gathered:
    """One sample so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Scores] = field(default_factory=list)
    prompt_logprobs: list[bytes] | None = None
    hidden_states: bytearray = field(default_factory=bytearray)
    finish: Finish | None = None
    accepted: int = 0
    """How many of the tokens were guessed."""
    _pieces: list[str] = field(default_factory=list)
    """The text of each token, until it is joined."""

    def take(self, chunk: Chunk) -> None:
        self._pieces += chunk.pieces
        self.token_ids += chunk.token_ids
        self.accepted += chunk.accepted
        self.logprobs += chunk.logprobs or ()
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        for states in chunk.hidden_states:
            self.hidden_states += states
        self.finish = chunk.finish or self.finish

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    async def again(self, turn: Turn) -> AsyncIterator[Chunk]:
        """All of it, some at a time: in between, others get their turn. To be read before `text`."""
        for begin in range(0, len(self.token_ids), SCORED):
            some = slice(begin, begin + SCORED)
            yield Chunk(self.token_ids[some], self._pieces[some], logprobs=self.logprobs[some])
            await turn.breathe()
        yield Chunk(finish=self.ended, cached_tokens=self.ended.metrics.cached_tokens)

    @property
    def summed(self) -> Chunk:
        """The output as one chunk, for counters."""
        steps = [(len(self.token_ids), self.accepted)]
        return Chunk(self.token_ids, steps=steps, finish=self.finish, cached_tokens=self.ended.metrics.cached_tokens)

    def forget(self) -> None:
        """Drop the large parts, once they have been written into the answer."""
        self.logprobs, self.prompt_logprobs = [], None

    @property
    def ended(self) -> Finish:
        assert self.finish is not None
        return self.finish


async def gather(generation: Generation) -> list[Gathered]:
    """All samples, complete. Raises ApiError if the engine dies."""
    gatherer = _Gatherer(len(generation.ids))
    await generation.read_by(gatherer)
    return gatherer.samples


class _Gatherer:
    keeps, ready = True, True

    def __init__(self, count: int) -> None:
        self.samples = [Gathered() for _ in range(count)]

    def take(self, arrived: Sequence[tuple[int, Chunk]]) -> bool:
        for index, chunk in arrived:
            self.samples[index].take(chunk)
        return False


def speculation_of(metrics: RequestMetrics) -> dict[str, Any]:
    """How a sample was drafted and how much was accepted, for answers; `lossless` is what the rule promises."""
    return {
        "drafter": metrics.drafter,
        "depth": metrics.depth,
        "acceptance": metrics.acceptance,
        "lossless": metrics.lossless,
        "simulated": metrics.simulated,
        "steps": metrics.steps,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "accepted_at": metrics.accepted_at,
        "reached_at": metrics.reached_at,
        **_sources_of(metrics),
    }


def _sources_of(metrics: RequestMetrics) -> dict[str, Any]:
    """What each source drafted, where the drafter has several."""
    if len(metrics.by_source) < 2:
        return {}
    return {"sources": {source: asdict(counts) for source, counts in sorted(metrics.by_source.items())}}
