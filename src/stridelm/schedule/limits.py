"""What a step may not exceed: rows, requests, pages. The cache is seen through five look-ups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stridelm.types import PageCounts, Request


@dataclass(frozen=True, slots=True)
class Budget:
    """tokens: most rows of a step, real and draft together. requests: most requests running at once."""

    tokens: int
    requests: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"max_num_batched_tokens must be at least 1; got {self.tokens}")
        if self.requests < 1:
            raise ValueError(f"max_num_seqs must be at least 1; got {self.requests}")


class PageView(Protocol):
    """What the planner may ask of the cache. Look-ups: none of them changes anything."""

    def available(self) -> PageCounts:
        """Pages that could be handed out now: free ones, and cached ones that nobody holds."""
        ...

    def missing(self, request: Request, end: int) -> int:
        """Pages to add to each of the request's tables as they are now, so that they cover storage [0, end)."""
        ...

    def growth(self, request: Request, pages: int) -> PageCounts:
        """How many more the request comes to hold while so many are added to its tables, step by step: fewer of a group
        whose window leaves pages behind."""
        ...

    def reclaimable(self, request: Request) -> PageCounts:
        """Pages that preempting the request would make available: those that it alone holds."""
        ...

    def match(self, request: Request) -> tuple[int, PageCounts]:
        """What admitting a waiting request would find: leading tokens in the prefix cache (fewer than it
        knows), and how many of their pages are idle now, so that taking them lowers `available`."""
        ...
