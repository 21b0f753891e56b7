"""One page group's pages: which are free, which are held and by how many requests, which are only cached.

Every page from 1 to `total` is in exactly one state:

    free      no request holds it, and its contents are not cached
    held      one or more requests have it in their page table
    cached    no request holds it, but its contents are known by hash; evicted when pages run out, oldest first

Page 0 is the null page: padding reads and writes it, and it is not counted.

The lowest free page is taken first, so that the highest tend to be free when memory is to serve another group.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping


class Pages:
    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self._free = list(range(1, total + 1))  # ascending, so already a heap
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._hashes_of: dict[int, list[bytes]] = {}
        self.on_forget: Callable[[bytes], None] | None = None
        """Called with each hash by which an evicted page could be found."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._idle)

    @property
    def held(self) -> int:
        return len(self._holders)

    @property
    def available(self) -> int:
        """Pages that `take` can give: free, or cached and idle."""
        return len(self._free) + len(self._idle)

    @property
    def holds(self) -> Mapping[int, int]:
        """Held pages, and by how many requests each is held."""
        return self._holders

    def holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def take(self, count: int) -> list[int]:
        """Hold `count` pages that no request holds; if none is free, evict the one idle the longest."""
        assert count <= self.available, f"{count} pages requested, {self.available} available"
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a hold on a page that is held or cached."""
        self._idle.pop(page, None)
        self._holders[page] = self._holders.get(page, 0) + 1

    def drop(self, pages: Iterable[int]) -> None:
        """Release one hold on each page; pass a request's pages in reverse, so that a chain's tail is evicted before
        its head."""
        for page in pages:
            left = self._holders[page] - 1
            if left:
                self._holders[page] = left
                continue
            del self._holders[page]
            if page in self._hashes_of:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)

    def name(self, page: int, digest: bytes) -> None:
        """Make a held page's contents findable by this hash; a page may have several. The first page with a hash keeps
        it."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._hashes_of.setdefault(page, []).append(digest)

    def find(self, digest: bytes) -> int | None:
        return self._page_of.get(digest)

    def flush(self) -> None:
        """Forget all cached contents; held pages stay held but can no longer be found."""
        self._free = sorted([*self._free, *self._idle])
        self._idle.clear()
        self._page_of.clear()
        self._hashes_of.clear()

    def grow(self, total: int) -> None:
        """Add free pages, up to this number in all."""
        assert total >= self.total
        for page in range(self.total + 1, total + 1):
            heapq.heappush(self._free, page)
        self.total = total

    def shrink(self, total: int) -> dict[int, int]:
        """Drop the pages after `total`, of which no more than are available may be dropped: as many are lost as free
        pages, then as cached ones, those idle the longest first. Returns held and cached pages that have been renamed,
        by their old number; the caller moves their contents, and renames them in page tables."""
        lost = self.total - total
        assert 0 <= lost <= self.available and total > 0, f"{lost} pages dropped, {self.available} available"
        while len(self._free) < lost:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            heapq.heappush(self._free, page)
        free = [page for page in sorted(self._free) if page <= total]
        above = sorted(page for page in (*self._holders, *self._idle) if page > total)
        renamed = dict(zip(above, free))
        self._free, self.total = free[len(above) :], total
        if renamed:
            self._rename(renamed)
        return renamed

    def _rename(self, renamed: dict[int, int]) -> None:
        self._holders = {renamed.get(page, page): count for page, count in self._holders.items()}
        self._idle = OrderedDict((renamed.get(page, page), None) for page in self._idle)
        self._hashes_of = {renamed.get(page, page): hashes for page, hashes in self._hashes_of.items()}
        self._page_of = {digest: renamed.get(page, page) for digest, page in self._page_of.items()}

    def _forget(self, page: int) -> None:
        for digest in self._hashes_of.pop(page):
            del self._page_of[digest]
            if self.on_forget is not None:
                self.on_forget(digest)
