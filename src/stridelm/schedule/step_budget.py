"""The rows and pages that a plan can still allocate, and what each request has been allocated so far.

A budget lives within one call of `plan`; allocating from it touches neither the queue nor the cache. A step adds the
same number of pages to a request's table in every page group. Groups differ in how many pages they have left, how many
pages of a prefix hit were idle, and how many the request gives back as a window moves on.
"""

from __future__ import annotations

from dataclasses import dataclass

from stridelm.schedule.limits import PageView
from stridelm.schedule.rows import first_row, following_rows, uncomputed_rows
from stridelm.types import Follow, PageCounts, Request, Span


@dataclass(slots=True)
class Allocation:
    """Rows and pages given to one request. `start` is where its real rows begin, a prefix hit included."""

    request: Request
    start: int
    uncomputed: int
    held: int
    """Pages that need not be added: those in each table, or in the prefix hit of a waiting request."""
    idle: PageCounts | None = None
    """The pages of the hit that no request holds: taken when the request first gets rows."""
    real: int = 0
    depth: int = 0
    rows: int = 0
    """Real rows, and those of a draft of this depth."""
    pages: int = 0
    """Pages added to each table."""
    following: int = 0
    """Rows of the next step for which `pages` suffice too."""
    allowed: int | None = None
    """Levels that the request may draft; None where the depth policy was not asked."""

    @property
    def decides(self) -> bool:
        return self.real == self.uncomputed

    def span(self, follow: Follow) -> Span:
        request, draft = self.request, self.rows - self.real
        return Span(request, self.start, self.real, self.depth, draft, self.decides, request.behind, follow)


class StepBudget:
    """Rows and pages left in one step."""

    def __init__(self, rows: int, view: PageView) -> None:
        self.rows = rows
        self.reading = float(rows)
        """How many of them `most_real` may still give to known tokens. The smallest span of a request may exceed it,
        so that every request proceeds."""
        self.view = view
        self.pages = view.available()
        self.lacked: PageCounts | None = None
        """What the first request that pages did not suffice for lacked in each group; below 0: those left beside."""

    def open(self, request: Request) -> Allocation:
        """An empty allocation for a running request."""
        start = first_row(request)
        return Allocation(request, start, uncomputed_rows(request, start), self.view.table_length(request))

    def open_waiting(self, request: Request) -> Allocation:
        """An empty allocation for a waiting request, which would start after its prefix hit."""
        hit, idle = self.view.match(request)
        assert 0 <= hit < request.known, f"prefix hit of {hit} tokens leaves request {request.id} no row to run"
        return Allocation(request, hit, request.known - hit, self.view.pages_for(hit), idle)

    def lacking(self, allocation: Allocation, rows: int) -> PageCounts:
        """Pages missing, at most 0 if none are, for the allocation to have `rows` rows in all."""
        return self._more(allocation, self._pages(allocation, rows)) - self.pages

    def note(self, lacking: PageCounts) -> None:
        """Remember that pages did not suffice, for the step's plan."""
        if self.lacked is None and any(short > 0 for short in lacking):
            self.lacked = lacking

    def affords(self, allocation: Allocation, rows: int) -> bool:
        if rows - allocation.rows > self.rows:
            return False
        return self.pages.cover(self._more(allocation, self._pages(allocation, rows)))

    def readable(self, allocation: Allocation, wanted: int) -> int:
        """Further real rows, up to `wanted` in all, that the rows of the step allow."""
        return int(max(0, min(wanted - allocation.real, self.rows, self.reading)))

    def most_real(self, allocation: Allocation, wanted: int) -> int:
        """Maximum affordable real rows, up to `wanted`. Page need grows with rows, so bisect."""
        low, high = allocation.real, allocation.real + self.readable(allocation, wanted)
        if high <= low or self.affords(allocation, high):
            return max(low, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.affords(allocation, middle) else (low, middle)
        return low

    def take(self, allocation: Allocation, real: int, depth: int) -> bool:
        """Widen the allocation to `real` rows and the draft of `depth`, if rows and pages allow."""
        rows = real + allocation.request.rows_by_depth[depth]
        if rows - allocation.rows > self.rows:
            return False
        pages = self._pages(allocation, rows)
        if pages != allocation.pages or allocation.idle is not None:  # usually a row fits into the last page
            more = self._more(allocation, pages)
            if not self.pages.cover(more):
                return False
            self.pages -= more
        self.rows -= rows - allocation.rows
        self.reading -= real - allocation.real
        allocation.real, allocation.depth, allocation.rows = real, depth, rows
        allocation.pages, allocation.idle = pages, None
        return True

    def look_ahead(self, allocation: Allocation) -> None:
        """Take pages for the request's smallest span in the next step too, even if there are too few: `pages` is below
        zero then."""
        served, end = allocation.real > 0, allocation.start + allocation.rows
        decides = served and allocation.decides
        allocation.following = following_rows(allocation.request, end, served=served, decides=decides)
        pages = self._pages(allocation, allocation.rows)
        self.pages -= self._more(allocation, pages)
        allocation.pages = pages

    def draft(self, allocation: Allocation, depth: int) -> bool:
        """Widen the allocation to the draft of `depth`, if rows and pages allow.

        If the next step will be short of pages, the request must hold and need as many then as if neither this step nor
        one in flight drafted for it: its rows stay on the page of its last token.
        """
        if min(self.pages) >= 0:
            return self.take(allocation, allocation.real, depth)
        request = allocation.request
        rows = allocation.real + request.rows_by_depth[depth]
        bound, end = request.known + request.tokens_in_flight, allocation.start + rows + allocation.following
        if rows - allocation.rows > self.rows or self.view.pages_for(end) > self.view.pages_for(bound):
            return False
        self.rows -= rows - allocation.rows
        allocation.depth, allocation.rows = depth, rows
        return True

    def promised(self, allocation: Allocation) -> PageCounts:
        """Pages to set aside for the request beyond this allocation, so that admitting another does not soon preempt
        it: for its known tokens, and one page to grow into unless it ends before that."""
        request = allocation.request
        window = request.rows_by_depth[-1] if request.all_or_nothing else 0
        need = self._pages(allocation, request.known - allocation.start + window) + 1
        if request.params.max_tokens is not None:
            last = len(request.prompt_ids) + request.params.max_tokens - 1 + window
            need = min(need, self._pages(allocation, last - allocation.start))
        growth = self.view.growth(request, max(0, need - allocation.pages))
        return growth if allocation.idle is None else growth + allocation.idle

    def _pages(self, allocation: Allocation, rows: int) -> int:
        return max(0, self.view.pages_for(allocation.start + rows + allocation.following) - allocation.held)

    def _more(self, allocation: Allocation, pages: int) -> PageCounts:
        """Pages to take from each group for the allocation to have `pages` in all."""
        more = self.pages.all(pages - allocation.pages)
        return more if allocation.idle is None else more + allocation.idle
