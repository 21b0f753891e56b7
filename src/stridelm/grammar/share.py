"""Divides the time that masks take between tenants.

The host makes a mask, and the whole step waits for it: usually for 50 microseconds, and some 0.2 s for the most
ambiguous grammars that are followed at all. While another tenant runs, a tenant's masks have SHARE of the time and
STEP_S of a step. Its requests sit out steps until that is so again, and lose nothing. Only a grammar that suddenly
takes more than BREAK_S of one step is ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from stridelm.types import Request

SHARE, STEP_S, BREAK_S = 0.25, 0.05, 0.5


class MaskShare:
    """Time is the thread's own (CPU) where masks are measured, so that a busy machine breaks no grammar."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._owed: dict[str, float] = {}
        """Tenant -> seconds of masks beyond its share."""
        self._step: dict[str, float] = {}
        """Tenant -> seconds of masks in the step that runs."""
        self._shared = False
        """Whether several tenants ran when the step was planned."""

    def charge(self, tenant: str, seconds: float) -> bool:
        """Note what a mask took. Returns whether the tenant has held up others for too long in this step."""
        self._step[tenant] = self._step.get(tenant, 0.0) + seconds
        self._owed[tenant] = self._owed.get(tenant, 0.0) + seconds
        return self._shared and self._step[tenant] > BREAK_S

    def rest(self, running: Iterable[Request], mask_s: Callable[[int], float | None]) -> None:
        """Decide which of these requests sit out the step that is planned next. mask_s: the seconds that a mask of a
        slot is expected to take, None for a slot without a grammar."""
        now = self._clock()
        earned, self._at = SHARE * (now - self._at), now
        self._step.clear()
        self._owed = {tenant: owed - earned for tenant, owed in self._owed.items() if owed > earned}
        running = list(running)
        tenants = {request.tenant for request in running}
        before, self._shared = self._shared, len(tenants) > 1
        if not (self._shared or before):
            return  # nobody rests
        expected = dict.fromkeys(tenants, 0.0)
        for request in running:
            own = mask_s(request.slot)
            request.resting = False
            if own is not None and self._shared:
                taken = expected[request.tenant]
                expected[request.tenant] += own * (1 + request.rows_by_depth[-1])
                owes = self._owed.get(request.tenant, 0.0) > STEP_S
                request.resting = owes or (taken > 0 and expected[request.tenant] > STEP_S)
