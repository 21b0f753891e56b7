"""The ledger: the one owner of every page and of every request's `computed`.

Nothing else moves `computed`. It grows by a prefix hit (`admit`) and by `commit`, and falls to zero by `release`
(finish, abort, preemption). Page groups share one notion of a request's length and keep separate pages; there is one
group today, and every table here is indexed by group already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stridelm.cache.pages import Pages
from stridelm.cache.prefix import extend, followed
from stridelm.cache.transaction import Transaction
from stridelm.types import Request, Span


@dataclass(slots=True)
class Lease:
    """What one running request holds."""

    tables: dict[str, list[int]]
    names: list[bytes] = field(default_factory=list)
    named: int = 0
    """Leading pages that have been made findable."""


class Ledger:
    """Pages of all groups, leases of all running requests.

    groups: page group -> number of pages. strict: check the balance at every step, not only when idle.
    """

    def __init__(
        self, groups: dict[str, int], page_size: int, *, prefix_caching: bool = True, strict: bool = False
    ) -> None:
        self.page_size = page_size
        self.strict = strict
        self._prefix_caching = prefix_caching
        self._pages = {group: Pages(total) for group, total in groups.items()}
        self._leases: dict[str, Lease] = {}
        self._waiting_names: dict[str, list[bytes]] = {}
        self.peak = 0
        """Most pages held at once, over all groups. Whoever watches a run sets it to zero first."""

    # What the planner asks. Nothing below this line and above `admit` changes anything but memoised hashes.

    def available(self) -> int:
        return min(pages.available for pages in self._pages.values())

    def total(self) -> int:
        return min(pages.total for pages in self._pages.values())

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def missing(self, request: Request, end: int) -> int:
        """Pages to add so that the request's tables cover storage [0, end)."""
        lease = self._leases.get(request.id)
        have = len(next(iter(lease.tables.values()))) if lease else 0
        return max(0, self.pages_for(end) - have)

    def reclaimable(self, request: Request) -> int:
        """Pages that releasing this request would make available."""
        lease = self._leases.get(request.id)
        if lease is None:
            return 0
        return min(
            sum(self._pages[group].holders(page) == 1 for page in table) for group, table in lease.tables.items()
        )

    def match(self, request: Request) -> tuple[int, int]:
        """(tokens that a prefix hit would give, idle pages it would take). At least one token is left to compute."""
        hit = self._hit(request)
        idle = max((sum(self._pages[group].is_idle(page) for page in pages) for group, pages in hit.items()), default=0)
        return min((len(pages) for pages in hit.values()), default=0) * self.page_size, idle

    def _hit(self, request: Request) -> dict[str, list[int]]:
        """Page group -> pages that already hold the request's longest cached prefix, the same length in each."""
        if not self._prefix_caching or request.params.reads_prompt:
            return {}
        tokens = request.token_ids
        names = self._waiting_names.setdefault(request.id, [])
        extend(names, tokens, self.page_size, request.params.cache_salt)
        behind = max(1, 0 if request.draft_kv is None else request.draft_kv.lookahead)
        hit: dict[str, list[int]] = {group: [] for group in self._pages}
        for index in range((len(tokens) - behind) // self.page_size):
            key = self._key(request, names[index], tokens, index)
            found = {group: pages.find(key) for group, pages in self._pages.items()}
            if any(page is None for page in found.values()):
                break
            for group, page in found.items():
                assert page is not None
                hit[group].append(page)
        return hit

    def _key(self, request: Request, name: bytes, tokens: list[int], index: int) -> bytes:
        """By what the request finds its page number `index`: its name, or with a follower the name that says its KV is
        in the page too."""
        draft_kv, end = request.draft_kv, (index + 1) * self.page_size
        return name if draft_kv is None else followed(name, draft_kv.name, tokens[end : end + draft_kv.lookahead])

    # What moves `computed`.

    def admit(self, request: Request) -> None:
        """Open a lease. A prefix hit gives the request its first pages, computed already."""
        assert request.id not in self._leases and request.computed == 0
        hit = self._hit(request)
        lease = Lease(tables={group: list(hit.get(group, ())) for group in self._pages})
        for group, pages in hit.items():
            for page in pages:
                self._pages[group].share(page)
        lease.names = self._waiting_names.pop(request.id, [])
        lease.named = min((len(pages) for pages in hit.values()), default=0)
        self._leases[request.id] = lease
        request.computed = lease.named * self.page_size
        request.stats.cached_tokens = max(request.stats.cached_tokens, request.computed)

    def reserve(self, spans: Iterable[Span]) -> Transaction:
        """Slots for every row of every span, until the transaction commits or is left."""
        transaction = Transaction(self, tuple(spans)).open()
        self.peak = max(self.peak, sum(pages.held for pages in self._pages.values()))
        return transaction

    def advance(self, request: Request, rows: int) -> None:
        """Commit's half of a transaction: the next `rows` storage indices hold the request's own tokens now."""
        request.computed += rows
        lease = self._leases[request.id]
        if self._prefix_caching:
            self._name_full_pages(request, lease)
        self.trim(request)

    def release(self, request: Request) -> None:
        """Give back everything the request holds. Its full pages linger for prefix hits."""
        lease = self._leases.pop(request.id, None)
        self._waiting_names.pop(request.id, None)
        request.computed = request.rows_in_flight = request.tokens_in_flight = 0
        if lease is not None:
            for group, table in lease.tables.items():
                self._pages[group].drop(reversed(table))

    def _name_full_pages(self, request: Request, lease: Lease) -> None:
        lookahead = 0 if request.draft_kv is None else request.draft_kv.lookahead
        full = min(request.computed, request.known - lookahead) // self.page_size
        if full <= lease.named:
            return
        tokens = request.token_ids
        extend(lease.names, tokens[: full * self.page_size], self.page_size, request.params.cache_salt)
        for index in range(lease.named, full):
            name = lease.names[index]
            for digest in dict.fromkeys((name, self._key(request, name, tokens, index))):
                for group, table in lease.tables.items():
                    self._pages[group].name(table[index], digest)
        lease.named = full

    # Pages, for the transaction.

    def grow(self, request: Request, end: int) -> None:
        """Extend the request's tables to cover storage [0, end)."""
        missing = self.missing(request, end)
        for group, table in self._leases[request.id].tables.items():
            table.extend(self._pages[group].take(missing))

    def trim(self, request: Request) -> None:
        """Give back pages behind the last computed token and whatever is in flight behind it."""
        keep = self.pages_for(request.computed + request.rows_in_flight)
        for group, table in self._leases[request.id].tables.items():
            self._pages[group].drop(reversed(table[keep:]))
            del table[keep:]

    def table(self, request: Request, group: str) -> list[int]:
        return self._leases[request.id].tables[group]

    def lease(self, request: Request) -> Lease | None:
        """What the request holds now. A lease is one admission's: another admission's is another object."""
        return self._leases.get(request.id)

    # The law.

    def counts(self) -> dict[str, dict[str, int]]:
        """Page group -> free, cached, held, total."""
        return {
            group: {"free": p.free, "cached": p.cached, "held": p.held, "total": p.total}
            for group, p in self._pages.items()
        }

    def flush(self) -> None:
        """Forget the prefix cache."""
        for pages in self._pages.values():
            pages.flush()

    def check(self, running: Iterable[Request]) -> None:
        """Raise RuntimeError naming the leak unless free + cached + held == total in every group, every lease belongs
        to a running request, and every hold is some lease's."""
        ids = {request.id for request in running}
        strays = sorted(set(self._leases) - ids)
        if strays:
            raise RuntimeError(f"leases without a running request: {', '.join(strays)}")
        for group, pages in self._pages.items():
            if pages.free + pages.cached + pages.held != pages.total:
                raise RuntimeError(
                    f"page group {group}: free {pages.free} + cached {pages.cached} + held {pages.held} "
                    f"!= total {pages.total}"
                )
            holds: dict[int, int] = {}
            for lease in self._leases.values():
                for page in lease.tables[group]:
                    holds[page] = holds.get(page, 0) + 1
            wrong = [
                f"page {page} held {pages.holders(page)} times, in {holds.get(page, 0)} tables"
                for page in range(1, pages.total + 1)
                if pages.holders(page) != holds.get(page, 0)
            ]
            if wrong:
                raise RuntimeError(f"page group {group}: {'; '.join(wrong[:8])}")
