"""What connections may hold, and who goes when there is too much of it.

Nobody is turned away for another's sake where that can be helped: beyond the bound on connections the one that has
waited longest for the rest of its request, or for its next, makes room for the new one; beyond the bound on memory the
connection that holds most ends. What takes too long is looked for twice a second in one pass over all connections,
rather than with a timer for each.
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
"""Descriptors for all but clients: an engine that is started again, files, and connections about to be refused."""
LEAST = 8


@dataclass(frozen=True)
class Limits:
    connections: int
    head_bytes: int
    head_s: float
    body_s: float
    body_idle_s: float
    write_s: float
    buffered: int
    """Bytes of all connections together."""

    @classmethod
    def of(cls, config: ServerConfig) -> Limits:
        """Raises the limit of open files, as far as the system lets it, to what so many connections need."""
        return cls(
            connections=_affordable(config.max_connections),
            head_bytes=config.h11_max_incomplete_event_size,
            head_s=config.timeout_head,
            body_s=config.timeout_body,
            body_idle_s=config.timeout_body_idle,
            write_s=config.timeout_write,
            buffered=int(config.max_buffered_mib * MIB),
        )


class Holder(Protocol):
    """A connection, as far as it is looked after here."""

    @property
    def buffered(self) -> int:
        """Bytes that are kept for it: of its request, and of answers that it has not taken."""

    def look(self, now: float) -> None:
        """End it if it takes too long."""

    def hang_up(self) -> None:
        """End it at once."""


class Guard:
    """Looks after all connections of a server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: OrderedDict[Holder, None] = OrderedDict()
        """Connections without a whole request, those first that have waited longest."""
        self.bodies = 0
        """Bytes of requests that are held."""
        self._swept = 0.0

    def has_room(self, count: int) -> bool:
        """Whether one more may stay beside `count` connections; one that waits is ended for it if need be."""
        if count < self.limits.connections:
            return True
        if not self.waiting:
            logger.warning("refused a connection: %d are open, all with a request; see --max-connections", count)
            return False
        logger.warning("ended a waiting connection for a new one: %d are open; see --max-connections", count)
        oldest, _ = self.waiting.popitem(last=False)
        oldest.hang_up()
        return True

    def received(self, size: int, holders: Iterable[Holder]) -> None:
        """Count bytes of a request, or discount them; if they are too many, those who hold most go."""
        self.bodies += size
        if self.bodies > self.limits.buffered:
            self.relieve(holders)

    def relieve(self, holders: Iterable[Holder]) -> None:
        """End whoever holds most, until the rest is within the bound."""
        sizes = [(holder.buffered, holder) for holder in holders]
        total = sum(size for size, _ in sizes)
        if total <= self.limits.buffered:
            return
        for size, holder in sorted(sizes, key=lambda one: one[0], reverse=True):
            logger.warning("ended a connection that held %d of %d bytes; see --max-buffered-mib", size, total)
            holder.hang_up()
            total -= size
            if total <= self.limits.buffered:
                return

    def sweep(self, holders: Iterable[Holder]) -> None:
        """Look at all connections, if it is time to."""
        now = time.monotonic()
        if now - self._swept < SWEEP_S:
            return
        self._swept = now
        found = list(holders)
        for holder in found:
            holder.look(now)
        self.relieve(found)


SWEEP_S = 0.5


def _affordable(wanted: int) -> int:
    """Connections for which there are descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + RESERVED:
        soft = wanted + RESERVED if hard == resource.RLIM_INFINITY else min(hard, wanted + RESERVED)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted + RESERVED:
        return wanted
    allowed = max(soft - RESERVED, LEAST)
    logger.warning(
        "%d descriptors (ulimit -n) are enough for %d connections, not for max_connections %d", soft, allowed, wanted
    )
    return allowed
