"""The samples of one HTTP request, and what has arrived for them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from stridelm.engine.request_metrics import RequestMetrics
from stridelm.server.chunk import MAX_CHUNK, Chunk
from stridelm.server.deliveries import Deliveries
from stridelm.server.errors import ApiError, answer_too_large
from stridelm.server.sample_text import SampleText

MAX_HELD = 256 << 20
"""Bytes, unless the server sets another limit."""
FEW = 16
"""Samples whose chunks are handed over at once."""


class Reader(Protocol):
    """What is made of the samples. Called by the loop itself, so it never waits."""

    @property
    def keeps(self) -> bool:
        """Whether it keeps what it takes until the answer is complete: all of it then counts as held."""

    @property
    def ready(self) -> bool:
        """Whether it would take anything now. When that changes, it calls Generation.wake."""

    def take(self, arrived: Sequence[tuple[int, Chunk]]) -> bool:
        """Take what has arrived, by the samples' index. Returns whether it needs to be called again before more is
        handed to it; it is then called with nothing."""


class Generation:
    """The samples of one HTTP request, numbered from 0, and the output that waits for their reader.

    Output that arrives while earlier output of its sample waits is put together with it: a slow reader gets much at
    once, and delays no one else.
    """

    due = False

    def __init__(self, group: str, count: int, tenant: str = "", deliveries: Deliveries | None = None) -> None:
        self.group = group
        self.tenant = tenant
        """Whose request it is (callers.py)."""
        self.ids = [f"{group}.{i}" for i in range(count)]
        self.began = time.monotonic()
        self.abandoned = False
        """True when nobody reads it any more."""
        self.ended: list[RequestMetrics] = []
        """Metrics of the samples that have ended."""
        self.tokens = 0
        self.held = 0
        """Approximate bytes of output that are held."""
        self.most_held = MAX_HELD
        """Bytes beyond which the samples are ended: their output is not being read, or not before it is complete."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when the last sample ends, at least once."""
        self.texts: Sequence[SampleText] = ()
        """Of the samples; without them the output has no text."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deliveries = deliveries or Deliveries()
        self._open = set(range(count))
        self._waiting: dict[int, deque[Chunk]] = {}
        """By sample, only where there is something."""
        self._reader: Reader | None = None
        self._unfinished = False
        """Whether the reader has work left that it took before."""
        self._read: asyncio.Future[None] | None = None
        self._error: ApiError | None = None

    @property
    def open_ids(self) -> list[str]:
        """Samples that have not ended."""
        return [self.ids[i] for i in sorted(self._open)]

    def push(self, index: int, chunk: Chunk) -> None:
        """Add a sample's output. The chunk may grow by what arrives before it is read."""
        self.tokens += len(chunk.token_ids)
        if chunk.finish is not None:
            self.ended.append(chunk.finish.metrics)
            self._open.discard(index)
            if not self._open:
                self.on_end()
        if not self.abandoned:
            self.held += chunk.held
            waiting = self._waiting.get(index)
            if waiting is None:
                self._waiting[index] = deque((chunk,))
            elif waiting[-1].held < MAX_CHUNK:
                waiting[-1].add(chunk)
            else:
                waiting.append(chunk)
        self.wake()

    def fail(self, error: ApiError) -> None:
        """End all samples; output that arrived before can still be read."""
        self._error = error
        self._open.clear()
        self.on_end()
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # marks it as retrieved: nobody may be awaiting it any more
        self.wake()

    def overflow(self) -> None:
        """Drop the output that is held; whoever reads gets the reason."""
        self._waiting.clear()
        self.held = 0
        self.fail(answer_too_large(self.most_held))

    async def read_by(self, reader: Reader) -> None:
        """Hand everything to the reader, until all samples have ended.

        Raises ApiError if the engine died, or if more had to be held than is allowed, and what the reader raises.
        """
        self._read = asyncio.get_running_loop().create_future()
        self._reader = reader
        self.wake()
        try:
            await self._read
        finally:
            self._reader = None

    def wake(self) -> None:
        """Let the reader go on, if there is one."""
        if self._reader is not None:
            self._deliveries.add(self)

    def advance(self) -> bool:
        """Hand the reader a bounded amount. Returns whether it would take more."""
        reader, read = self._reader, self._read
        if reader is None or read is None or read.done():
            return False
        try:
            if self._unfinished or self._waiting:
                if not reader.ready:
                    return False
                self._unfinished = reader.take([] if self._unfinished else self._some(reader.keeps))
                if self._unfinished or self._waiting:
                    return True
        except Exception as error:
            read.set_exception(error)
            return False
        if self._error is not None:
            read.set_exception(self._error)
        elif not self._open:
            read.set_result(None)
        return False

    def _some(self, keeps: bool) -> list[tuple[int, Chunk]]:
        """The next chunk of some samples."""
        some = []
        for index in list(islice(self._waiting, FEW)):
            waiting = self._waiting.pop(index)
            chunk = waiting.popleft()
            if waiting:
                self._waiting[index] = waiting  # at the end: the other samples are next
            if not keeps:
                self.held -= chunk.held
            some.append((index, chunk))
        return some
