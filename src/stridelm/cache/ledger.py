"""The ledger: the one owner of every page and of every request's `computed`.

Nothing else moves `computed`. It grows by a prefix hit (`admit`) and by `commit`, and falls to zero by `release`
(finish, abort, preemption).

Page groups share each request's length and keep separate pages, as each needs: a group with full attention keeps all of
a request's pages, and one with a window those that the next row's window reaches. Pages that the window has passed are
given back while the request runs, and their table entries point to the null page:

    computed 70, window 20, pages of 16       storage  0    16   32   48   64
    full                                      table    [7   12   3    9    4 ]
    window_20                                 table    [0   0    0    5    11]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from stridelm.cache.events import CacheEvents
from stridelm.cache.pages import Pages
from stridelm.cache.prefix import extend, followed
from stridelm.cache.transaction import Transaction
from stridelm.types import PageCounts, Request, Span


@dataclass(slots=True)
class Lease:
    """What one running request holds."""

    tables: dict[str, list[int]]
    """Page group -> page table; 0 where the window has passed."""
    length: int
    """Of each table."""
    left: dict[str, int]
    """Page group -> number of leading pages that its window has passed."""
    stamp: int
    """Another one whenever a table has changed; no two leases ever have the same."""
    names: list[bytes] = field(default_factory=list)
    named: int = 0
    """Number of leading pages that have been made findable by their names."""
    followed: int = 0
    """Number of those that can also be found by requests whose drafter keeps KV, because they hold all of that."""

    def pages(self, group: str) -> list[int]:
        """The pages that are held."""
        return self.tables[group][self.left[group] :]


class Ledger:
    """The pages of all groups and the leases of all running requests."""

    def __init__(
        self,
        groups: dict[str, int],
        page_size: int,
        *,
        windows: Mapping[str, int | None] | None = None,
        prefix_caching: bool = True,
        strict: bool = False,
    ) -> None:
        """groups: page group -> number of pages. windows: page group -> how far back its layers attend, own token
        included; by default to everything. strict: check the balance at every step, not only when idle."""
        self.page_size = page_size
        self.strict = strict
        self._prefix_caching = prefix_caching
        self._pages = {group: Pages(total) for group, total in groups.items()}
        self.windows = {group: (windows or {}).get(group) for group in groups}
        self._is_windowed = any(self.windows.values())
        self._leases: dict[str, Lease] = {}
        self._stamps = count(1)
        self._waiting_names: dict[str, list[bytes]] = {}
        self._events: CacheEvents | None = None
        self._told_group = next((group for group, window in self.windows.items() if window is None), next(iter(groups)))
        """The page group that the events are about."""
        self.peak = 0
        """Maximum number of pages held at once, over all groups. To measure a run, set it to zero first."""

    # Queries from the planner. Between this line and `admit` nothing changes but memoised hashes and `rereads`.

    def available(self) -> PageCounts:
        return PageCounts(pages.available for pages in self._pages.values())

    def total(self) -> PageCounts:
        return PageCounts(pages.total for pages in self._pages.values())

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def table_length(self, request: Request) -> int:
        """Of each of the request's page tables, pages that a window has passed included."""
        lease = self._leases.get(request.id)
        return lease.length if lease else 0

    def most_held(self, tokens: int, rows: int = 1) -> PageCounts:
        """Maximum pages that a request holds at once until it has `tokens` tokens, run `rows` rows at a time."""
        all_pages = self.pages_for(tokens)
        windows = self.windows.values()
        return PageCounts(all_pages if w is None else min(all_pages, self.pages_for(w + rows) + 1) for w in windows)

    def growth(self, request: Request, pages: int) -> PageCounts:
        """How many more pages of each group the request will hold after `pages` are added to its tables."""
        if not self._is_windowed:
            return PageCounts((pages,) * len(self._pages))
        more = self.to_come(request, (self.table_length(request) + pages) * self.page_size)
        return PageCounts(min(pages, each) for each in more)

    def to_come(self, request: Request, tokens: int, rows: int = 1) -> PageCounts:
        """How many more pages of each group the request may hold until it has `tokens` tokens, `rows` rows at a
        time."""
        lease = self._leases.get(request.id)
        most = self.most_held(tokens, rows)
        held = [0 if lease is None else len(lease.pages(group)) for group in self._pages]
        return PageCounts(max(0, m - h) for m, h in zip(most, held, strict=True))

    def reclaimable(self, request: Request) -> PageCounts:
        """Pages that releasing this request would make available."""
        lease = self._leases.get(request.id)
        if lease is None:
            return PageCounts((0,) * len(self._pages))
        return PageCounts(
            sum(pages.holders(page) == 1 for page in lease.pages(group)) for group, pages in self._pages.items()
        )

    def match(self, request: Request) -> tuple[int, PageCounts]:
        """(tokens that a prefix hit would cover, idle pages it would take). At least one token is left to compute."""
        length, hit = self._hit(request)
        idle = (sum(map(pages.is_idle, filter(None, hit[group]))) for group, pages in self._pages.items())
        return length * self.page_size, PageCounts(idle)

    def _hit(self, request: Request) -> tuple[int, dict[str, list[int]]]:
        """(pages in the request's longest cached prefix, page group -> a table of them).

        In a group with a window, only the pages that the row after the prefix sees must be cached.
        """
        nothing: dict[str, list[int]] = {group: [] for group in self._pages}
        request.rereads = False
        if not self._prefix_caching or request.params.reads_prompt:
            return 0, nothing
        tokens = request.token_ids
        names = self._waiting_names.setdefault(request.id, [])
        extend(names, tokens, self.page_size, request.params.cache_salt)
        after = max(1, 0 if request.draft_kv is None else request.draft_kv.lookahead)  # tokens that must follow it
        max_pages = (len(tokens) - after) // self.page_size
        found: dict[str, list[int]] = {}
        # Groups with full attention first: their hits bound what is looked up for the others.
        for group in sorted(self._pages, key=lambda group: self.windows[group] is not None):
            found[group] = self._lookup(request, names[:max_pages], tokens, group)
            max_pages = len(found[group])
        runs = {group: _runs(table) for group, table in found.items()}
        for length in range(max_pages, 0, -1):
            left = {group: self._passed(group, length * self.page_size) for group in found}
            if all(run[length - 1] >= length - left[group] for group, run in runs.items()):
                return length, {g: [0] * left[g] + table[left[g] : length] for g, table in found.items()}
        return 0, nothing

    def _lookup(self, request: Request, names: list[bytes], tokens: list[int], group: str) -> list[int]:
        """The cached page of each name in a group, 0 where there is none; without a window, only the pages before the
        first miss."""
        table = []
        for index, name in enumerate(names):
            page = self._pages[group].find(self._key(request, name, tokens, index)) or 0
            if not page and self.windows[group] is None:
                request.rereads |= self._pages[group].find(name) is not None
                break
            table.append(page)
        return table

    def _passed(self, group: str, computed: int) -> int:
        """Number of leading pages that no row from storage index `computed` on sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, computed - window + 1) // self.page_size

    def _key(self, request: Request, name: bytes, tokens: list[int], index: int) -> bytes:
        """The hash under which the request looks up its page number `index`: the page's name, or, with draft KV, the
        name of a page that holds that KV too."""
        draft_kv, end = request.draft_kv, (index + 1) * self.page_size
        return name if draft_kv is None else followed(name, draft_kv.name, tokens[end : end + draft_kv.lookahead])

    # Operations that move `computed`.

    def admit(self, request: Request) -> None:
        """Open a lease. A prefix hit provides the request's first pages, already computed."""
        assert request.id not in self._leases and request.computed == 0
        length, hit = self._hit(request)
        left = {group: self._passed(group, length * self.page_size) for group in hit}
        names = self._waiting_names.pop(request.id, [])
        lease = Lease(hit, length, left, next(self._stamps), names, named=length, followed=length)
        for group in hit:
            for page in lease.pages(group):
                self._pages[group].share(page)
        self._leases[request.id] = lease
        request.computed = length * self.page_size
        request.stats.cached_tokens = max(request.stats.cached_tokens, request.computed)

    def reserve(self, spans: Iterable[Span]) -> Transaction:
        """Reserve slots for every row of every span, until the transaction commits or exits."""
        transaction = Transaction(self, tuple(spans)).open()
        self.peak = max(self.peak, sum(pages.held for pages in self._pages.values()))
        return transaction

    def advance(self, request: Request, rows: int) -> None:
        """Commit for one request: its next `rows` storage indices now hold its own tokens."""
        request.computed += rows
        lease = self._leases[request.id]
        if self._prefix_caching and request.computed // self.page_size > lease.followed:
            self._name_full_pages(request, lease)
        self.trim(request)

    def release(self, request: Request) -> None:
        """Give back everything the request holds. Its full pages stay cached for prefix hits."""
        lease = self._leases.pop(request.id, None)
        self._waiting_names.pop(request.id, None)
        request.computed = request.rows_in_flight = request.tokens_in_flight = request.behind = 0
        if lease is not None:
            for group, pages in self._pages.items():
                pages.drop(reversed(lease.pages(group)))

    def _name_full_pages(self, request: Request, lease: Lease) -> None:
        full = followed = min(request.computed, request.known) // self.page_size
        if request.draft_kv is not None:
            end = min(request.computed, request.known - request.draft_kv.lookahead)
            followed = max(lease.followed, (end - request.behind) // self.page_size)
        if full <= lease.named and followed <= lease.followed:
            return
        tokens = request.token_ids
        extend(lease.names, tokens[: full * self.page_size], self.page_size, request.params.cache_salt)
        for index in range(lease.named, full):
            self._name(lease, index, lease.names[index])
        if self._events is not None:
            begin = max(lease.named, lease.left[self._told_group])
            self._events.stored(request, lease.names, begin, full, tokens)
        if request.draft_kv is not None:
            for index in range(lease.followed, followed):
                self._name(lease, index, self._key(request, lease.names[index], tokens, index))
        lease.named, lease.followed = full, followed

    def _name(self, lease: Lease, index: int, digest: bytes) -> None:
        for group, table in lease.tables.items():
            if index >= lease.left[group]:
                self._pages[group].name(table[index], digest)

    # Page operations, for the transaction.

    def grow(self, request: Request, end: int) -> Lease:
        """Extend the request's tables to cover storage [0, end)."""
        lease = self._leases[request.id]
        missing = self.pages_for(end) - lease.length
        if missing > 0:
            for group, table in lease.tables.items():
                table.extend(self._pages[group].take(missing))
            lease.length += missing
            lease.stamp = next(self._stamps)
        return lease

    def trim(self, request: Request) -> None:
        """Give back the pages after the last computed token and the rows in flight after it, and those that windows
        have passed."""
        lease = self._leases[request.id]
        keep = self.pages_for(request.computed + request.rows_in_flight)
        if keep < lease.length:
            for group, table in lease.tables.items():
                self._pages[group].drop(reversed(table[keep:]))
                del table[keep:]
            lease.length = keep
            lease.stamp = next(self._stamps)
        if self._is_windowed:
            self._leave_behind(request, lease)

    def _leave_behind(self, request: Request, lease: Lease) -> None:
        """Give back the pages that windows have passed."""
        for group, table in lease.tables.items():
            old, left = lease.left[group], self._passed(group, request.computed)
            if left > old:
                self._pages[group].drop(table[old:left])
                table[old:left] = [0] * (left - old)
                lease.left[group] = left
                lease.stamp = next(self._stamps)

    def table(self, request: Request, group: str) -> list[int]:
        return self._leases[request.id].tables[group]

    def lease(self, request: Request) -> Lease | None:
        """What the request holds now. Each admission opens a new lease object."""
        return self._leases.get(request.id)

    # Invariants.

    def counts(self) -> dict[str, dict[str, int]]:
        """Page group -> free, cached, held, total."""
        return {
            group: {"free": p.free, "cached": p.cached, "held": p.held, "total": p.total}
            for group, p in self._pages.items()
        }

    def resize(self, group: str, total: int) -> dict[int, int]:
        """Let the group have `total` pages; see Pages.grow and Pages.shrink. Returns renamed pages by their old number,
        which is no longer in any table. No transaction may be open."""
        pages = self._pages[group]
        if total >= pages.total:
            pages.grow(total)
            return {}
        renamed = pages.shrink(total)
        if renamed:
            for lease in self._leases.values():
                lease.tables[group][:] = [renamed.get(page, page) for page in lease.tables[group]]
                lease.stamp = next(self._stamps)
        return renamed

    def flush(self) -> None:
        """Forget the prefix cache."""
        for pages in self._pages.values():
            pages.flush()
        if self._events is not None:
            self._events.cleared()

    def tell(self, events: CacheEvents) -> None:
        """Forget the prefix cache, and from now on tell `events` what it gains and loses."""
        self._events = events
        self._pages[self._told_group].on_forget = events.removed
        self.flush()

    def check(self, running: Iterable[Request]) -> None:
        """Raise RuntimeError naming the leak unless free + cached + held == total in every group, every lease belongs
        to a running request, every hold belongs to a lease, and no request has more tokens computed than known."""
        running = tuple(running)
        ids = {request.id for request in running}
        strays = sorted(set(self._leases) - ids)
        if strays:
            raise RuntimeError(f"leases without a running request: {', '.join(strays)}")
        for request in running:
            if request.computed > request.known:
                raise RuntimeError(
                    f"request {request.id} has {request.computed} tokens computed but only {request.known} known"
                )
        for group, pages in self._pages.items():
            if pages.free + pages.cached + pages.held != pages.total:
                raise RuntimeError(
                    f"page group {group}: free {pages.free} + cached {pages.cached} + held {pages.held} "
                    f"!= total {pages.total}"
                )
            holds: dict[int, int] = {}
            for lease in self._leases.values():
                for page in lease.pages(group):
                    holds[page] = holds.get(page, 0) + 1
            for request in running:
                if request.id not in self._leases:
                    continue
                lease = self._leases[request.id]
                left, table = self._passed(group, request.computed), lease.tables[group]
                if len(table) != lease.length:
                    raise RuntimeError(
                        f"page group {group}: request {request.id} has a table of {len(table)} pages and should have "
                        f"{lease.length}"
                    )
                if any(table[:left]) or not all(table[left:]):
                    raise RuntimeError(
                        f"page group {group}: request {request.id} with {request.computed} computed "
                        f"tokens has page table {table}, whose first {left} pages its window has passed"
                    )
            if holds != pages.holds:
                wrong = [
                    f"page {page} held {pages.holders(page)} times, in {holds.get(page, 0)} tables"
                    for page in sorted({*holds, *pages.holds})
                    if pages.holders(page) != holds.get(page, 0)
                ]
                raise RuntimeError(f"page group {group}: {'; '.join(wrong[:8])}")


def _runs(table: list[int]) -> list[int]:
    """Length of the run of consecutive pages that ends at each entry; 0 where there is no page."""
    runs: list[int] = []
    for page in table:
        runs.append((runs[-1] if runs else 0) + 1 if page else 0)
    return runs
