"""The limits of a step: rows, requests, pages. The planner sees the cache through six queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stridelm.types import PageCounts, Request

PATIENCE, HOST_PATIENCE = 16, 128
"""Most rows for which a drafter's own KV may wait, where depths are chosen. On a card one pass for so many costs little
more than for one. On a host it costs as much as so many, but many a request ends before it is due, short prompts
included."""


@dataclass(frozen=True, slots=True)
class Budget:
    """tokens: maximum rows of a step, real and draft together. requests: maximum requests running at once."""

    tokens: int
    requests: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"max_num_batched_tokens must be at least 1; got {self.tokens}")
        if self.requests < 1:
            raise ValueError(f"max_num_seqs must be at least 1; got {self.requests}")


class PageView(Protocol):
    """The planner's read-only queries to the cache."""

    def available(self) -> PageCounts:
        """Pages that could be handed out now: free ones, and cached ones that no request holds."""
        ...

    def pages_for(self, tokens: int) -> int:
        """Length of a table that covers storage [0, tokens)."""
        ...

    def table_length(self, request: Request) -> int:
        """Of each of the request's current tables, in pages; 0 if it waits."""
        ...

    def growth(self, request: Request, pages: int) -> PageCounts:
        """How many more pages the request will hold after `pages` are added to its tables step by step: fewer in a
        group whose window passes pages meanwhile."""
        ...

    def reclaimable(self, request: Request) -> PageCounts:
        """Pages that preempting the request would make available: those that only it holds."""
        ...

    def match(self, request: Request) -> tuple[int, PageCounts]:
        """What admitting a waiting request would find: leading tokens in the prefix cache (fewer than its known
        tokens), and how many of their pages are idle now, so that taking them lowers `available`."""
        ...
