"""Who is to blame for a step that failed, where nothing says whose it was.

A step is one pass for all its requests, so an error in it may come of any of them. They all start over from the tokens
that were emitted, and whoever emits another is beyond doubt. If a step fails again before all are, those in doubt are
tried by halves: one half runs by itself until each of it has emitted a token or left, then the other; a half that fails
is halved again. What fails alone is to blame, if a request of the engine's own still runs. So n requests wait for about
2 log2(n) steps and for the prompts that are read again, and none but the guilty is lost.

If a request of the engine's own fails too, or if all are fine apart and fail together again, it is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence

from stridelm.faults import EngineFault
from stridelm.types import Request, Status


class Doubts:
    def __init__(self) -> None:
        self._emitted: dict[Request, int] = {}
        """Requests in doubt -> how many tokens they had when the step failed."""
        self._trials: list[list[Request]] = []
        """Those still to be tried; the last is on trial."""
        self._tried: list[Request] = []
        """All that the trials are about."""
        self._blamed = False
        """Whether one of them was to blame."""
        self._fine_apart = False
        """Those in doubt were tried, and none was to blame."""

    @property
    def on_trial(self) -> frozenset[Request] | None:
        """Who alone may run now; None: everybody."""
        return frozenset(self._trials[-1]) if self._trials else None

    @property
    def any(self) -> bool:
        """Whether anybody is in doubt."""
        return bool(self._emitted)

    def look(self) -> bool:
        """Take the doubt from whoever has emitted or left since. Returns whether others are to run now."""
        self._emitted = {request: had for request, had in self._emitted.items() if not _cleared(request, had)}
        before = len(self._trials)
        while self._trials and self._emitted.keys().isdisjoint(self._trials[-1]):
            self._trials.pop()
        if before and not self._trials:
            # Nobody was to blame: see whether they run together.
            self._fine_apart = not self._blamed
            self._doubt([] if self._blamed else [r for r in self._tried if r.status is not Status.FINISHED])
        elif not self._emitted:
            self._fine_apart = False
        return len(self._trials) < before

    def failed(self, involved: Sequence[Request]) -> Request | None:
        """Take note that a step of these requests failed. Returns the one to blame, if it is alone in doubt.

        Raises EngineFault if all were fine apart and fail together again.
        """
        suspects = [request for request in involved if request in self._emitted]
        if not suspects:
            self._doubt(involved)
            return None
        if self._fine_apart and not self._trials:
            raise EngineFault("requests that the engine can serve apart make it fail together")
        if self._trials:
            self._trials.pop()
        else:
            self._tried, self._blamed = suspects, False
        if len(suspects) == 1:
            self._blamed = True
            return suspects[0]
        half = len(suspects) // 2
        self._trials += [suspects[half:], suspects[:half]]
        return None

    def _doubt(self, requests: Sequence[Request]) -> None:
        self._emitted = {request: len(request.output_ids) for request in requests}


def _cleared(request: Request, had: int) -> bool:
    return request.status is Status.FINISHED or len(request.output_ids) > had
