"""What clients saw of one run: a load from its first request to its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """One request that was answered. Times in seconds since it was sent or, in process, since it arrived."""

    at: Sequence[float]
    """When each event with tokens arrived. Not empty."""
    tokens: int
    """Of the output."""
    prompt_tokens: int
    text: str
    token_ids: tuple[int, ...] | None = None
    """None if the server does not report them."""
    steps: int | None = None
    """Steps that emitted its tokens; None if the server does not report them."""
    drafted: int | None = None
    accepted: int | None = None
    finish_reason: str | None = None

    @property
    def ttft(self) -> float:
        return self.at[0]

    @property
    def latency(self) -> float:
        return self.at[-1]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first event, as `vllm bench serve` has it; None for a single token."""
        return (self.latency - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class Run:
    """seconds: from the beginning of the load to its last answer."""

    seconds: float
    completions: tuple[Completion | None, ...]
    """In the order of the requests; None for a request that failed."""
    errors: tuple[str, ...] = ()
    client_busy: float | None = None
    """Share of the time for which the client computed: near 1, it and not the server was measured. None in process."""

    @property
    def answered(self) -> list[Completion]:
        return [each for each in self.completions if each is not None]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.answered)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds
