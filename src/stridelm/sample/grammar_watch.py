"""Makes the masks of a step on a thread, so that a grammar that takes too long can be abandoned.

A matcher is native code that cannot be interrupted, and a grammar can be so ambiguous that a single mask takes half a
minute. The matcher releases the interpreter's lock (GIL) meanwhile, so the caller can stop waiting: the request is
ended as too slow, its thread is left to finish by itself, and the step goes on with another thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import torch

from stridelm.faults import on_behalf_of
from stridelm.sample.grammar import TOO_SLOW, Guide

PATIENCE_S = 1.0
"""How long one mask may take."""
MAX_LEFT_BEHIND = 4
"""Threads that may be left behind at once: each occupies a core until its mask is made. At this many, new grammars are
refused."""

Asked = tuple[Guide, Sequence[int]]
"""A request for a mask: the guide, and the path after which the mask is wanted."""


class _Round:
    """The masks of one step, and the progress on them."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.asked = asked
        self.masks: list[torch.Tensor | None] = []
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._began = time.monotonic()
        """When work on the current mask began."""
        self._given_up = False
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            for guide, path in self.asked:
                with on_behalf_of(guide.request):
                    mask = guide.mask(path)
                with self._lock:
                    if self._given_up:
                        return
                    self.masks.append(mask)
                    self._began = time.monotonic()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()

    def wait(self) -> Guide | None:
        """Wait until all masks are made, or until one takes too long; return that one's guide. The masks after it are
        not made."""
        while not self.done.wait(max(0.0, self._began + PATIENCE_S - time.monotonic())):
            with self._lock:
                if not self.done.is_set() and time.monotonic() >= self._began + PATIENCE_S:
                    self._given_up = True
                    return self.asked[len(self.masks)][0]
        return None


class _Worker(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="stride-grammar", daemon=True)
        self.rounds: SimpleQueue[_Round | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (current := self.rounds.get()) is not None:
            current.run()


class GrammarWatch:
    """Makes all masks of a process; called by the thread that steps its engines."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._left_behind: list[_Worker] = []

    @property
    def crowded(self) -> bool:
        """Whether so many threads are left behind that new grammars must be refused."""
        self._left_behind = [worker for worker in self._left_behind if worker.is_alive()]
        return len(self._left_behind) >= MAX_LEFT_BEHIND

    def masks(self, asked: Sequence[Asked]) -> list[torch.Tensor | None]:
        """The guides' masks, in order (`Guide.mask`); None also for one that takes too long, whose guide is then
        broken. Raises RequestFault."""
        masks: list[torch.Tensor | None] = []
        while len(masks) < len(asked):
            if self._worker is None:
                self._worker = _Worker()
            attempt = _Round(asked[len(masks) :])
            self._worker.rounds.put(attempt)
            slow = attempt.wait()
            masks += attempt.masks
            if slow is not None:
                slow.broken = TOO_SLOW
                masks.append(None)
                self._leave_behind(self._worker)
            elif attempt.error is not None:
                raise attempt.error
        return masks

    def _leave_behind(self, worker: _Worker) -> None:
        """Abandon a worker; its thread ends once its mask is made."""
        worker.rounds.put(None)
        self._left_behind.append(worker)
        self._worker = None


WATCH = GrammarWatch()
