"""Finds the request that makes a step fail, if the error itself does not name it.

A step is one pass for all its requests, so any of them may have caused an error in it. All start over from the tokens
already emitted, and a request that emits another token is cleared. If a step fails again before all are cleared, the
suspects are bisected: one half runs by itself until each of its requests has emitted a token or left, then the other; a
half that fails is halved again. A request that fails alone is to blame, provided that a test request of the engine's
own still runs. So n requests wait for about 2 log2(n) steps and for prefilling their prompts again, and only the one to
blame is lost.

If the engine's own request fails too, or if all run separately but fail together again, no single request is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence

from stridelm.faults import EngineFault
from stridelm.types import Request, Status


class Doubts:
    def __init__(self) -> None:
        self._emitted: dict[Request, int] = {}
        """Suspect -> number of its output tokens when the step failed."""
        self._trials: list[list[Request]] = []
        """Groups of suspects still to be tried; the last one is being tried."""
        self._tried: list[Request] = []
        """All suspects of the current trials."""
        self._blamed = False
        """Whether one of them was to blame."""
        self._fine_apart = False
        """The suspects were tried, and none was to blame."""

    @property
    def on_trial(self) -> frozenset[Request] | None:
        """The only requests that may run now; None for all."""
        return frozenset(self._trials[-1]) if self._trials else None

    @property
    def any(self) -> bool:
        """Whether there are suspects."""
        return bool(self._emitted)

    def look(self) -> bool:
        """Clear the suspects that have since emitted or left. Returns whether another group is to run now."""
        self._emitted = {request: had for request, had in self._emitted.items() if not _cleared(request, had)}
        before = len(self._trials)
        while self._trials and self._emitted.keys().isdisjoint(self._trials[-1]):
            self._trials.pop()
        if before and not self._trials:
            # If no request was to blame, try whether they run together.
            self._fine_apart = not self._blamed
            self._doubt([] if self._blamed else [r for r in self._tried if r.status is not Status.FINISHED])
        elif not self._emitted:
            self._fine_apart = False
        return len(self._trials) < before

    def failed(self, involved: Sequence[Request]) -> Request | None:
        """Record that a step of these requests failed. Returns the one to blame, if it is the only suspect.

        Raises EngineFault if all ran separately and fail together again.
        """
        suspects = [request for request in involved if request in self._emitted]
        if not suspects:
            self._doubt(involved)
            return None
        if self._fine_apart and not self._trials:
            raise EngineFault("requests that the engine can serve separately make it fail together")
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
