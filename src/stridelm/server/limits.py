"""Limits on connections and their memory, and which connection is closed when they are exceeded.

New clients are not turned away as long as there is an alternative: beyond the limit on connections, the one that has
waited longest for the rest of its request, or for its next, is closed for the new one; beyond the limit on memory, the
connection that holds most is closed. Timeouts are checked twice a second in one pass over all connections, rather than
with a timer for each.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from stridelm.server.config import ServerConfig

logger = logging.getLogger(__name__)

MIB = 1 << 20
RESERVED = 128
"""Descriptors that clients may not use: for an engine restart, files, and connections about to be refused."""
MIN_CONNECTIONS = 8


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

    @property
    def buffered(self) -> int:
        """Bytes held for it: of its request, and of answers that the client has not read."""

    def look(self, now: float) -> None:
        """Close it if it has timed out."""

    def hang_up(self) -> None:
        """Close it at once."""


class Guard:
    """Enforces the limits on all connections of a server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: OrderedDict[Holder, None] = OrderedDict()
        """Connections without a complete request, longest-waiting first."""
        self.bodies = 0
        """Bytes of request bodies held."""
        self._swept = 0.0

    def has_room(self, count: int) -> bool:
        """Whether one more connection may stay in addition to `count`; if necessary, a waiting one is closed for it."""
        if count < self.limits.connections:
            return True
        if not self.waiting:
            logger.warning("refused a connection: %d are open, all with a request; see --max-connections", count)
            return False
        logger.warning("closed a waiting connection for a new one: %d are open; see --max-connections", count)
        oldest, _ = self.waiting.popitem(last=False)
        oldest.hang_up()
        return True

    def received(self, size: int, holders: Iterable[Holder]) -> None:
        """Add bytes of a request body, or subtract them; if too many are held, close the connections that hold most."""
        self.bodies += size
        if self.bodies > self.limits.buffered:
            self.relieve(holders)

    def relieve(self, holders: Iterable[Holder]) -> None:
        """Close the connections that hold most, until the rest is within the limit."""
        sizes = [(holder.buffered, holder) for holder in holders]
        total = sum(size for size, _ in sizes)
        if total <= self.limits.buffered:
            return
        for size, holder in sorted(sizes, key=lambda one: one[0], reverse=True):
            logger.warning("closed a connection that held %d of %d bytes; see --max-buffered-mib", size, total)
            holder.hang_up()
            total -= size
            if total <= self.limits.buffered:
                return

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
