"""Makes the masks of a step on a thread, so that a grammar that does not come back is left behind.

A matcher is foreign code that nothing can interrupt, and what may follow can be ambiguous in so many ways that a single
mask takes half a minute. It lets go of the interpreter's lock meanwhile, so whoever waits can stop waiting: the request
is ended as too slow, its thread is left to finish by itself, and the step goes on with another.
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
"""Threads that may be left behind at once: each has a core to itself until its grammar comes back. Beyond it new
grammars are refused."""

Asked = tuple[Guide, Sequence[int]]
"""Whose mask, and behind which path."""


class _Round:
    """The masks of one step, and how far they are."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.asked = asked
        self.masks: list[torch.Tensor | None] = []
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._began = time.monotonic()
        """When the mask that is being made was begun."""
        self._given_up = False
        self._turn = threading.Lock()

    def run(self) -> None:
        try:
            for guide, path in self.asked:
                with on_behalf_of(guide.request):
                    mask = guide.mask(path)
                with self._turn:
                    if self._given_up:
                        return
                    self.masks.append(mask)
                    self._began = time.monotonic()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()

    def wait(self) -> Guide | None:
        """Until all are made, or one takes too long: whose. What comes after that one is not made."""
        while not self.done.wait(max(0.0, self._began + PATIENCE_S - time.monotonic())):
            with self._turn:
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
        while (given := self.rounds.get()) is not None:
            given.run()


class GrammarWatch:
    """All masks of a process are made through one of these, by whoever steps its engines."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._left_behind: list[_Worker] = []

    @property
    def crowded(self) -> bool:
        """Whether so many threads were left behind that no other grammar should come."""
        self._left_behind = [worker for worker in self._left_behind if worker.is_alive()]
        return len(self._left_behind) >= MAX_LEFT_BEHIND

    def masks(self, asked: Sequence[Asked]) -> list[torch.Tensor | None]:
        """The guides' masks, in order (`Guide.mask`); None too for one that takes too long, whose guide is broken then.
        Raises RequestFault."""
        found: list[torch.Tensor | None] = []
        while len(found) < len(asked):
            if self._worker is None:
                self._worker = _Worker()
            given = _Round(asked[len(found) :])
            self._worker.rounds.put(given)
            slow = given.wait()
            found += given.masks
            if slow is not None:
                slow.broken = TOO_SLOW
                found.append(None)
                self._leave_behind(self._worker)
            elif given.error is not None:
                raise given.error
        return found

    def _leave_behind(self, worker: _Worker) -> None:
        """It ends once its mask is made."""
        worker.rounds.put(None)
        self._left_behind.append(worker)
        self._worker = None


WATCH = GrammarWatch()
