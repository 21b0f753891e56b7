"""Adds up the metrics of all processes.

Counters never go down: a front-end's last snapshot stands for it while it does not answer, and once it has ended is
added to the parent's own. What it counted after that, in its last second at most, is lost.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from stridelm.server.frontends.fleet import Fleet, Member
from stridelm.server.frontends.messages import SnapshotTaken, SnapshotWanted, encode, snapshot_of
from stridelm.server.metrics import Metrics
from stridelm.server.shared import Shared

ANSWER_S = 0.5
"""How long a front-end may take to answer."""


class Totals:
    """own: the parent's: what the engine reports, and what front-ends that have ended had counted."""

    def __init__(self, own: Metrics, fleet: Fleet) -> None:
        self._own, self._fleet = own, fleet
        self._number = 0
        self._collected = Shared(self._collect)

    def take(self, member: Member, message: SnapshotTaken) -> None:
        member.snapshot = message.snapshot
        member.snapshot_number = max(member.snapshot_number, message.number)

    def left(self, member: Member) -> None:
        """It has ended: keep what it counted."""
        if member.snapshot is not None:
            self._own.add(snapshot_of(member.snapshot))
            member.snapshot = None

    async def snapshots(self) -> list[bytes]:
        """Encoded snapshots whose sum is everything, taken after the call."""
        return await self._collected.get()

    async def _collect(self) -> list[bytes]:
        self._number += 1
        number, asked = self._number, self._fleet.serving
        self._fleet.tell(SnapshotWanted(number))
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(
                self._fleet.until(lambda: all(one.ended or one.snapshot_number >= number for one in asked)),
                ANSWER_S,
            )
        return [encode(self._own.snapshot())] + [
            member.snapshot for member in self._fleet.members if member.snapshot is not None
        ]
