"""An HTTP process's end of the connection to the engine: sends requests, and delivers results to whoever awaits
them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from stridelm.engine.request_metrics import RequestMetrics
from stridelm.params import SamplingParams
from stridelm.server.errors import (
    ApiError,
    answer_too_large,
    bad_request,
    engine_died,
    no_places,
    overloaded,
    request_failed,
    rid_taken,
)
from stridelm.server.messages import (
    Abort,
    Accepted,
    Attach,
    Beat,
    Delta,
    Failed,
    Flush,
    Flushed,
    FromEngine,
    Job,
    Outputs,
    Ready,
    Refused,
    Report,
    Submit,
    ToEngine,
    encode,
    from_engine,
    plain,
)
from stridelm.server.weight import weight

logger = logging.getLogger(__name__)

MAX_HELD = 256 << 20
"""Bytes, unless the server sets another limit."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, packed, and how it is to be completed, `params.n` times."""

    ids: array[int]
    params: SamplingParams


class Generation:
    """The samples of one HTTP request, numbered from 0, and the deltas that have arrived for them.

    Deltas accumulate until they are read: a slow reader gets many at once, and delays no one else.
    """

    def __init__(self, group: str, count: int, tenant: str = "") -> None:
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
        """Approximate bytes of deltas that are held."""
        self.most_held = MAX_HELD
        """Bytes beyond which the samples are ended: their output is not being read, or not before it is complete."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when the last sample ends, at least once."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = set(range(count))
        self._arrived: list[tuple[int, Delta]] = []
        self._woken = asyncio.Event()
        self._error: ApiError | None = None

    @property
    def open_ids(self) -> list[str]:
        """Samples that have not ended."""
        return [self.ids[i] for i in sorted(self._open)]

    def push(self, index: int, delta: Delta) -> None:
        self.tokens += len(delta.token_ids)
        if not self.abandoned:
            self._arrived.append((index, delta))
            self.held += weight(delta)
        if delta.finish is not None:
            self.ended.append(delta.finish.metrics)
            self._open.discard(index)
            if not self._open:
                self.on_end()
        self._woken.set()

    def fail(self, error: ApiError) -> None:
        """End all samples; deltas that arrived before can still be read."""
        self._error = error
        self._open.clear()
        self.on_end()
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # marks it as retrieved: nobody may be awaiting it any more
        self._woken.set()

    def overflow(self) -> None:
        """Drop the deltas that are held; the next read raises the reason."""
        self._arrived.clear()
        self.held = 0
        self.fail(answer_too_large(self.most_held))

    async def next(self, keep: bool = False) -> list[tuple[int, Delta]]:
        """The deltas since the last call, at least one; empty when all samples have ended. keep: the caller keeps them
        until the answer is complete, and they count as held until then.

        Raises ApiError if the engine died, or if more had to be held than is allowed.
        """
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            self._woken.clear()
            await self._woken.wait()
        arrived, self._arrived = self._arrived, []
        if not keep:
            self.held = 0
        return arrived


@dataclass
class EngineClient:
    """One engine process's sockets. `watch` is called with every delta and its time, `heard` with every report."""

    directory: str
    """Where the sockets are; no other user may access it."""
    watch: Callable[[Generation, Delta, float], None]
    heard: Callable[[Report], None]
    context: zmq.asyncio.Context
    """One for all clients of a process: if descriptors have run out, libzmq aborts a process that creates a new one."""
    frontend: str = ""
    """Name of this front-end, with which its ids begin. The process that starts the engine has an empty one."""
    to_engine: str = ""
    """Address of the engine's inbox; by default a new one, for an engine that is about to start."""
    ready: asyncio.Future[Ready | Failed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    open: dict[str, tuple[Generation, int]] = field(default_factory=dict)
    """Sample id -> its generation, and its index there."""

    def __post_init__(self) -> None:
        self.beats = 0
        """Heartbeats received from the engine's loop."""
        self._groups: dict[str, Generation] = {}
        self._flushes: dict[str, asyncio.Future[bool]] = {}
        self._count = itertools.count()
        tag = secrets.token_hex(8)
        self.to_engine = self.to_engine or f"ipc://{self.directory}/{tag}.in"
        self.from_engine = f"ipc://{self.directory}/{tag}.out"
        self._sockets: list[zmq.asyncio.Socket] = []
        try:
            self._receiver = self._socket(zmq.PULL)
            self._receiver.bind(self.from_engine)
            self._sender = self._socket(zmq.PUSH)
            self._sender.connect(self.to_engine)  # messages wait there until the engine listens
        except BaseException:
            self._close_sockets()
            raise
        if self.frontend:
            self.send(Attach(self.frontend, self.from_engine))
        self.reading = asyncio.create_task(self._read())
        """Never ends by itself; if it fails, the engine's messages are no longer received."""

    async def submit(
        self,
        prompts: Sequence[Prompt],
        tenant: str = "",
        max_open: int | None = None,
        max_own: int | None = None,
        rids: Sequence[str] = (),
    ) -> Generation:
        """Submit the prompts to the engine, all or none. A prompt's samples are consecutive.

        tenant: whose they are; tenants share no cached state of the engine, and take turns. max_open, max_own: limits
        on the samples that may be open with these, of all tenants and of this one, over all front-ends. rids: names
        that must not be in use by another request of this tenant.
        Raises ApiError if one of them cannot be served.
        """
        generation = Generation(self._new_id(), sum(prompt.params.n for prompt in prompts), tenant)
        ids = iter(generation.ids)
        jobs = [_job(prompt, list(itertools.islice(ids, prompt.params.n)), tenant) for prompt in prompts]
        try:
            message = encode(Submit(generation.group, jobs, max_open, max_own, list(rids)))
        except OverflowError as error:
            raise bad_request("a number in the request has more than 64 bits; lower it") from error
        except UnicodeEncodeError as error:
            raise bad_request("a text in the request is not valid Unicode; leave lone surrogates out") from error
        self._groups[generation.group] = generation
        self.open.update({id: (generation, i) for i, id in enumerate(generation.ids)})
        self._post(message)
        try:
            await generation.accepted
        except BaseException:  # the client left before the engine had answered
            self.abandon(generation)
            raise
        return generation

    def abandon(self, generation: Generation) -> None:
        """Nobody awaits it any more: abort the samples that still run."""
        generation.abandoned = True
        self.cut(generation)

    def cut(self, generation: Generation) -> None:
        """End the samples that still run, with the finish reason abort."""
        running = [id for id in generation.open_ids if id in self.open]
        if running:
            self.send(Abort(running))

    async def flush(self) -> bool:
        """Drop cached prefixes and what drafters have learned; False, with nothing done, if a sample is open, of
        whichever front-end. Raises ApiError if the engine dies."""
        id = self._new_id()
        answer = self._flushes[id] = asyncio.get_running_loop().create_future()
        try:
            self.send(Flush(id))
            return await answer
        finally:
            self._flushes.pop(id, None)

    def _new_id(self) -> str:
        return f"{self.frontend}g{next(self._count)}"

    def fail_all(self) -> None:
        """The engine is gone: every open request fails."""
        for answer in self._flushes.values():
            if not answer.done():
                answer.set_exception(engine_died())
        for generation in {id(g): g for g, _ in self.open.values()}.values():
            generation.fail(engine_died())
        self.open.clear()
        self._groups.clear()

    async def close(self) -> None:
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)
        self._close_sockets()

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(0)
        return socket

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)

    def send(self, message: ToEngine) -> None:
        """Never blocks: there is no high-water mark."""
        self._post(encode(message))

    def _post(self, message: bytes) -> None:
        self._sender.send(message, zmq.NOBLOCK)

    async def _read(self) -> None:
        while True:
            self._take(from_engine(await self._receiver.recv()))

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            now = time.monotonic()
            for delta in message.deltas:
                self._deliver(delta, now)
            if message.report is not None:
                self.heard(message.report)
        elif isinstance(message, Beat):
            self.beats += 1
        elif isinstance(message, Ready | Failed):
            self.ready.set_result(message)
        elif isinstance(message, Accepted):
            generation = self._groups.pop(message.group, None)
            if generation is not None and not generation.accepted.done():
                generation.accepted.set_result(None)
        elif isinstance(message, Flushed):
            answer = self._flushes.get(message.id)
            if answer is not None and not answer.done():
                answer.set_result(message.done)
        else:
            assert isinstance(message, Refused)
            generation = self._groups.pop(message.group, None)
            if generation is not None:
                for id in generation.ids:
                    self.open.pop(id, None)
                generation.fail(_refusal(message))

    def _deliver(self, delta: Delta, now: float) -> None:
        entry = self.open.get(delta.id)
        if entry is None:
            return
        generation, index = entry
        if delta.finish is not None:
            del self.open[delta.id]
        self.watch(generation, delta, now)
        if delta.finish is not None and delta.finish.reason == "error":
            self.abandon(generation)
            generation.fail(request_failed(f"{delta.id}: {delta.finish.error}"))
        else:
            generation.push(index, delta)
            if generation.held > generation.most_held:
                self.abandon(generation)
                generation.overflow()


def _refusal(message: Refused) -> ApiError:
    if message.kind == "max_open":
        return overloaded(message.open)
    if message.kind == "max_own":
        return no_places(message.open)
    if message.kind == "rid":
        return rid_taken()
    return (request_failed if message.kind == "engine" else bad_request)(message.message)


def _job(prompt: Prompt, ids: list[str], tenant: str) -> Job:
    """Samples of one prompt share a seed; the engine distinguishes them by their index."""
    seed = None if prompt.params.seed is not None else secrets.randbits(63)
    params = plain(prompt.params)
    if tenant:
        params["cache_salt"] = f"{tenant}:{prompt.params.cache_salt or ''}"
    return Job(ids, prompt.ids.tobytes(), params, seed, tenant)
