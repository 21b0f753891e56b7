"""What a plan in the making has left to spend, and what each request has been granted so far.

A purse is made and thrown away within one `plan`; spending from it touches neither the queue nor the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from stridelm.schedule.limits import PageView
from stridelm.schedule.rows import first_row, uncomputed_rows
from stridelm.types import Request, Span


@dataclass(slots=True)
class Allocation:
    """Rows and pages given to one request. `start` is where its real rows begin, a prefix hit included."""

    request: Request
    start: int
    uncomputed: int
    offset: int = 0
    """Correction to `missing` for a waiting request: the hit's pages need no adding, idle ones are taken."""
    real: int = 0
    depth: int = 0
    pages: int = 0

    @property
    def rows(self) -> int:
        return self.real + self.request.rows_by_depth[self.depth]

    @property
    def decides(self) -> bool:
        return self.real == self.uncomputed

    def span(self) -> Span:
        return Span(
            self.request, self.start, self.real, self.depth, self.request.rows_by_depth[self.depth], self.decides
        )


class StepBudget:
    """Rows and pages left in one step."""

    def __init__(self, rows: int, view: PageView) -> None:
        self.rows = rows
        self.view = view
        self.pages = view.available()

    def open(self, request: Request) -> Allocation:
        """An empty grant for a running request."""
        start = first_row(request)
        return Allocation(request, start, uncomputed_rows(request, start))

    def open_waiting(self, request: Request) -> Allocation:
        """An empty grant for a waiting request, which would start behind its prefix hit."""
        hit, idle = self.view.match(request)
        assert 0 <= hit < request.known, f"prefix hit of {hit} tokens leaves request {request.id} no row to run"
        return Allocation(request, hit, request.known - hit, idle - self.view.missing(request, hit))

    def lacking(self, allocation: Allocation, rows: int) -> int:
        """Pages short, 0 or less if none, for the grant to have `rows` rows in all."""
        return self._pages(allocation, rows) - allocation.pages - self.pages

    def affords(self, allocation: Allocation, rows: int) -> bool:
        return rows - allocation.rows <= self.rows and self.lacking(allocation, rows) <= 0

    def most_real(self, allocation: Allocation, wanted: int) -> int:
        """Most real rows up to `wanted` that can be paid for. Page need grows with rows: halve."""
        low, high = allocation.real, min(wanted, allocation.real + self.rows)
        if high <= low or self.affords(allocation, high):
            return max(low, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.affords(allocation, middle) else (low, middle)
        return low

    def take(self, allocation: Allocation, real: int, depth: int) -> bool:
        """Widen the grant to `real` rows and the draft of `depth`, if rows and pages allow."""
        more_rows = real + allocation.request.rows_by_depth[depth] - allocation.rows
        if more_rows > self.rows:
            return False
        pages = self._pages(allocation, allocation.rows + more_rows)
        if pages - allocation.pages > self.pages:
            return False
        self.rows -= more_rows
        self.pages -= pages - allocation.pages
        allocation.real, allocation.depth, allocation.pages = real, depth, pages
        return True

    def promised(self, allocation: Allocation) -> int:
        """Pages to keep for the request beyond this grant, so that admitting another does not preempt it
        soon: its known tokens, and one page to grow into unless it ends before that."""
        request = allocation.request
        window = request.rows_by_depth[-1] if request.all_or_nothing else 0
        need = self._pages(allocation, request.known - allocation.start + window) + 1
        if request.params.max_tokens is not None:
            last = len(request.prompt_ids) + request.params.max_tokens - 1 + window
            need = min(need, self._pages(allocation, last - allocation.start))
        return max(0, need - allocation.pages)

    def _pages(self, allocation: Allocation, rows: int) -> int:
        return self.view.missing(allocation.request, allocation.start + rows) + allocation.offset
