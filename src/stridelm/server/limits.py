"""Limits on connections and their memory, and which connection is closed when they are exceeded.

Nobody is turned away or closed for what another client has, known by its tenant, or until its first request by its
address:

- Beyond the limit on connections, one that waits for the rest of its request, or for its next, is closed for a new one:
  of the client with most such connections, the one that has waited longest. If nearly all have a request, a few new
  connections may still tell their client; if another has more connections, that one's newest is closed for it. Before
  any of these go those that were refused, and stay open only until their clients have read why.
- Beyond the limit on memory, requests and answers may each have half, and what the other leaves. Of the kind that has
  more, the client that holds most loses its largest connection.

Timeouts are checked twice a second in one pass over all connections, rather than with a timer for each.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from stridelm.server.config import ServerConfig
from stridelm.server.feeding import Feeder

logger = logging.getLogger(__name__)

MIB = 1 << 20
RESERVED = 128
"""Descriptors that clients may not use: for an engine restart, files, and connections about to be refused."""
MIN_CONNECTIONS = 8
MAX_NEWCOMERS = 32
"""Connections beyond the limit that may send the head of a request, which tells the client; with low limits fewer."""


@dataclass(frozen=True)
class Limits:
    connections: int
    head_bytes: int
    head_s: float
    body_s: float
    body_idle_s: float
    write_s: float
    buffered: int
    """Bytes, over all connections."""

    @classmethod
    def of(cls, config: ServerConfig, processes: int = 1) -> Limits:
        """For one of so many processes that share the connections evenly. Raises the limit on open files to what this
        many connections need, as far as the system allows."""
        return cls(
            connections=_affordable(max(config.max_connections // processes, 1)),
            head_bytes=config.h11_max_incomplete_event_size,
            head_s=config.timeout_head,
            body_s=config.timeout_body,
            body_idle_s=config.timeout_body_idle,
            write_s=config.timeout_write,
            buffered=int(config.max_buffered_mib * MIB / processes),
        )


class Holder(Protocol):
    """What the guard needs of a connection."""

    tenant: str
    """Of its last request (callers.py); before its first, the client's address."""

    opened: float
    """When it was opened."""

    @property
    def buffered(self) -> tuple[int, int]:
        """Bytes held for it: of its request, and of answers that the client has not read."""

    def look(self, now: float) -> None:
        """Close it if it has timed out."""

    def hang_up(self) -> None:
        """Close it at once."""


class Guard:
    """Enforces the limits on all connections of a server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.feeder = Feeder()
        self._waiting: dict[str, dict[Holder, None]] = {}
        """Tenant -> its connections without a complete request, longest-waiting first."""
        self._leaving: dict[Holder, None] = {}
        """Those that were told to go, longest ago first."""
        self.bodies = 0
        """Bytes of request bodies held."""
        self._swept = 0.0

    def wait(self, holder: Holder) -> None:
        """It waits for a request, or for the rest of one."""
        self._waiting.setdefault(holder.tenant, {})[holder] = None

    def leave(self, holder: Holder) -> None:
        """It is open only so that its client can read the last answer."""
        self._leaving[holder] = None

    def unwait(self, holder: Holder) -> bool:
        """It has a complete request, or is closed. Returns whether it waited."""
        self._leaving.pop(holder, None)
        line = self._waiting.get(holder.tenant, {})
        if holder not in line:
            return False
        del line[holder]
        if not line:
            del self._waiting[holder.tenant]
        return True

    def has_room(self, count: int) -> bool:
        """Whether one more connection may stay in addition to `count`, at least for a head; if necessary, a waiting one
        is closed for it."""
        if count < self.limits.connections or self._close_leaving():
            return True
        newcomers = max(min(self.limits.connections // 8, MAX_NEWCOMERS), 1)
        waiting, full = sum(map(len, self._waiting.values())), count >= self.limits.connections + newcomers
        if waiting >= newcomers or (waiting and full):
            logger.warning("closed a waiting connection for a new one: %d are open; see --max-connections", count)
            most = max(self._waiting, key=lambda tenant: len(self._waiting[tenant]))
            next(iter(self._waiting[most])).hang_up()  # which calls `unwait`
            return True
        if not full:
            return True
        logger.warning("refused a connection: %d are open, all with a request; see --max-connections", count)
        return False

    def admits(self, newcomer: Holder, holders: Collection[Holder]) -> bool:
        """Whether a connection may stay once its client is known; if necessary, the newest of the client with most is
        closed for it. holders: all connections, also this one."""
        if len(holders) <= self.limits.connections or self._close_leaving():
            return True
        counts = Counter(holder.tenant for holder in holders)
        [(most, count)] = counts.most_common(1)
        if counts[newcomer.tenant] >= count:
            logger.warning("refused a connection: %d are open, all with a request; see --max-connections", count)
            return False
        logger.warning("closed one of a client's %d connections for another client; see --max-connections", count)
        max((holder for holder in holders if holder.tenant == most), key=lambda one: one.opened).hang_up()
        return True

    def _close_leaving(self) -> bool:
        """Close one of those that were told to go, if there is any."""
        holder = next(iter(self._leaving), None)
        if holder is not None:
            holder.hang_up()  # which calls `unwait`
        return holder is not None

    def received(self, size: int, holders: Iterable[Holder]) -> None:
        """Add bytes of a request body, or subtract them; if too many are held, close connections."""
        self.bodies += size
        if self.bodies > self.limits.buffered:
            self.relieve(holders)

    def relieve(self, holders: Iterable[Holder]) -> None:
        """Close connections until the rest is within the limit."""
        sizes = {holder: holder.buffered for holder in holders}
        if sum(map(sum, sizes.values())) <= self.limits.buffered:
            return
        by_client: tuple[dict[str, list[Holder]], ...] = ({}, {})
        """Of each kind: tenant -> its connections, the largest last."""
        held: tuple[Counter[str], ...] = (Counter(), Counter())
        for kind in (BODIES, ANSWERS):
            for holder in sorted(sizes, key=lambda one: sizes[one][kind]):
                by_client[kind].setdefault(holder.tenant, []).append(holder)
                held[kind][holder.tenant] += sizes[holder][kind]
        while (total := sum(one.total() for one in held)) > self.limits.buffered:
            kind = max((BODIES, ANSWERS), key=lambda kind: held[kind].total())
            [(most, _)] = held[kind].most_common(1)
            holder = by_client[kind][most].pop()
            if (size := sizes.pop(holder, None)) is None:
                continue  # closed already, for what it held of the other kind
            logger.warning("closed a connection that held %d of %d bytes; see --max-buffered-mib", sum(size), total)
            for kind in (BODIES, ANSWERS):
                held[kind][most] -= size[kind]
            holder.hang_up()

    def sweep(self, holders: Iterable[Holder]) -> None:
        """Check all connections, if the last sweep is SWEEP_S ago."""
        now = time.monotonic()
        if now - self._swept < SWEEP_S:
            return
        self._swept = now
        snapshot = list(holders)
        for holder in snapshot:
            holder.look(now)
        self.relieve(snapshot)


SWEEP_S = 0.5
BODIES, ANSWERS = range(2)
"""Kinds of bytes in Holder.buffered."""


def _affordable(wanted: int) -> int:
    """The number of connections for which there are descriptors, at most `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + RESERVED:
        soft = wanted + RESERVED if hard == resource.RLIM_INFINITY else min(hard, wanted + RESERVED)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted + RESERVED:
        return wanted
    allowed = max(soft - RESERVED, MIN_CONNECTIONS)
    logger.warning(
        "%d descriptors (ulimit -n) are enough for %d connections, not for max_connections %d", soft, allowed, wanted
    )
    return allowed
