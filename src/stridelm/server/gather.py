"""Accumulates the deltas of a sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stridelm.engine.request_metrics import RequestMetrics
from stridelm.server.engine_client import Generation
from stridelm.server.messages import Delta, Finish, Scores


@dataclass
class Gathered:
    """One sample so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Scores] = field(default_factory=list)
    prompt_logprobs: list[bytes] | None = None
    hidden_states: bytearray = field(default_factory=bytearray)
    finish: Finish | None = None

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.hidden_states += delta.hidden_states or b""
        self.finish = delta.finish or self.finish

    def forget(self) -> None:
        """Drop the large parts, once they have been written into the answer."""
        self.logprobs, self.prompt_logprobs = [], None

    @property
    def ended(self) -> Finish:
        assert self.finish is not None
        return self.finish


async def gather(generation: Generation) -> list[Gathered]:
    """All samples, complete. Raises ApiError if the engine dies."""
    samples = [Gathered() for _ in generation.ids]
    while arrived := await generation.next(keep=True):
        for index, delta in arrived:
            samples[index].take(delta)
    return samples


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
    }
