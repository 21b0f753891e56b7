"""A cache of what was made of grammars, which tenants share: none of them can evict all of another's.

Its bytes are limited, since a compiled grammar may have two hundred or two hundred million. Beyond the limit, the
tenant that has most loses what it used longest ago. What open requests use (`hold`) is never evicted, and does not
count: making it again would stop the whole engine when such a request is admitted.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

CACHE_BYTES = 128 << 20
"""Memory for compiled grammars that no open request uses."""
K = TypeVar("K", bound=Hashable)


@dataclass
class _Entry:
    compiled: Any
    size: int
    owner: str
    """The tenant that has put it there."""


class GrammarCache(Generic[K]):
    """May be used by several threads. max_bytes: of all entries that are not held."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[K, _Entry] = {}
        self._idle: dict[str, OrderedDict[K, None]] = {}
        """Tenant -> those of its entries that are not held, most recently used last."""
        self._idle_bytes: Counter[str] = Counter()
        self._held: dict[str, Counter[K]] = {}
        """Tenant -> what it holds, in the cache or not."""

    def get(self, spec: K) -> Any | None:
        with self._lock:
            entry = self._entries.get(spec)
            if entry is None:
                return None
            if spec in self._idle.get(entry.owner, ()):
                self._idle[entry.owner].move_to_end(spec)
            return entry.compiled

    def put(self, spec: K, compiled: Any, size_bytes: int, tenant: str = "") -> None:
        """Evict as needed; an entry larger than the whole cache is kept only while it is held."""
        with self._lock:
            if spec not in self._entries:
                self._entries[spec] = _Entry(compiled, size_bytes, tenant)
                self._release(spec)

    def size(self, spec: K) -> int:
        """Bytes of an entry; 0 for one that is not there."""
        with self._lock:
            entry = self._entries.get(spec)
            return 0 if entry is None else entry.size

    def hold(self, spec: K, tenant: str) -> bool:
        """Keep an entry, or one that is yet to be made, until `free`. Returns whether it is there already."""
        with self._lock:
            entry = self._entries.get(spec)
            if entry is not None and not self._is_held(spec):
                self._take(spec, entry)
            self._held.setdefault(tenant, Counter())[spec] += 1
            return entry is not None

    def free(self, spec: K, tenant: str) -> None:
        """Undo one `hold`."""
        with self._lock:
            held = self._held[tenant]
            held[spec] -= 1
            if not held[spec]:
                del held[spec]
            if not held:
                del self._held[tenant]
            self._release(spec)

    def held_bytes(self, tenant: str) -> int:
        """Bytes of the entries that a tenant holds."""
        with self._lock:
            return sum(self._entries[spec].size for spec in self._held.get(tenant, ()) if spec in self._entries)

    def _is_held(self, spec: K) -> bool:
        return any(spec in held for held in self._held.values())

    def _release(self, spec: K) -> None:
        """Let the entry be evicted, unless somebody holds it."""
        entry = self._entries.get(spec)
        if entry is None or self._is_held(spec):
            return
        self._idle.setdefault(entry.owner, OrderedDict())[spec] = None
        self._idle_bytes[entry.owner] += entry.size
        if entry.size > self._max_bytes:
            self._drop(spec, entry)
        while self._idle_bytes.total() > self._max_bytes:
            oldest = next(iter(self._idle[max(self._idle_bytes, key=self._idle_bytes.__getitem__)]))
            self._drop(oldest, self._entries[oldest])

    def _drop(self, spec: K, entry: _Entry) -> None:
        self._take(spec, entry)
        del self._entries[spec]

    def _take(self, spec: K, entry: _Entry) -> None:
        """Remove an entry from those that can be evicted."""
        del self._idle[entry.owner][spec]
        self._idle_bytes[entry.owner] -= entry.size
        if not self._idle[entry.owner]:
            del self._idle[entry.owner], self._idle_bytes[entry.owner]
