"""An HTTP process's end of the connection to the engine: sends requests, and delivers results to whoever awaits
them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import zmq

from stridelm.params import SamplingParams
from stridelm.server.callers import EVERYBODY, Caller
from stridelm.server.chunk import Chunk
from stridelm.server.deliveries import Deliveries
from stridelm.server.errors import (
    ApiError,
    bad_request,
    engine_died,
    no_places,
    overloaded,
    request_failed,
    rid_taken,
)
from stridelm.server.generation import Generation
from stridelm.server.inbox import Inbox
from stridelm.server.messages import (
    Abort,
    Accepted,
    Attach,
    Beat,
    Cut,
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
from stridelm.server.sample_text import SampleText
from stridelm.text.output import bad_word_ids
from stridelm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One prompt, packed, and how it is to be completed, `params.n` times."""

    ids: array[int]
    params: SamplingParams
    bad_words: list[list[int]] = field(default_factory=list)
    """Tokens of the words that the parameters forbid."""
    texts: Sequence[SampleText] = ()
    """Of its samples; without them the output has no text."""
    kept: frozenset[int] = frozenset()
    """Special tokens that are part of the text in any case."""


def with_text(prompts: Sequence[Prompt], tokenizer: Tokenizer, hidden_size: int) -> list[Prompt]:
    """The prompts with `bad_words` and `texts`. Raises ValueError for a word that has no tokens."""
    words: dict[int, list[list[int]]] = {}
    ready = []
    for prompt in prompts:
        params = prompt.params
        if id(params) not in words:  # prompts usually share their parameters
            words[id(params)] = bad_word_ids(tokenizer, params)
        texts = [SampleText(tokenizer, prompt.ids, params, hidden_size, prompt.kept) for _ in range(params.n)]
        ready.append(replace(prompt, bad_words=words[id(params)], texts=texts))
    return ready


@dataclass
class EngineClient:
    """One engine process's sockets. `watch` is called with the index and the output of a sample whenever there is some,
    and with its time; `heard` with every report."""

    directory: str
    """Where the sockets are; no other user may access it."""
    watch: Callable[[Generation, int, Chunk, float], None]
    heard: Callable[[Report], None]
    context: zmq.Context[zmq.Socket[bytes]]
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
        self._sockets: list[zmq.Socket[bytes]] = []
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
        self._deliveries = Deliveries()
        self._inbox = Inbox(self._receiver, lambda message: self._take(from_engine(message)))
        self.reading = self._inbox.reading
        """Never done by itself; if it fails, the engine's messages are no longer received."""

    async def submit(
        self,
        prompts: Sequence[Prompt],
        caller: Caller = EVERYBODY,
        max_open: int | None = None,
        max_own: int | None = None,
        rids: Sequence[str] = (),
    ) -> Generation:
        """Submit the prompts to the engine, all or none. A prompt's samples are consecutive.

        caller: tenants take turns, and share cached state of the engine only without keys. max_open, max_own: limits
        on the samples that may be open with these, of all tenants and of this one, over all front-ends. rids: names
        that must not be in use by another request of this tenant.
        Raises ApiError if one of them cannot be served.
        """
        count = sum(prompt.params.n for prompt in prompts)
        generation = Generation(self._new_id(), count, caller.tenant, self._deliveries)
        generation.texts = [text for prompt in prompts for text in prompt.texts]
        ids = iter(generation.ids)
        jobs = [_job(prompt, list(itertools.islice(ids, prompt.params.n)), caller) for prompt in prompts]
        try:
            message = encode(Submit(generation.group, jobs, max_open, max_own, list(rids)))
        except OverflowError as error:
            raise bad_request("a number in the request has more than 64 bits; lower it") from error
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

    def close(self) -> None:
        self._inbox.close()
        self._close_sockets()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(0)
        return socket

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)

    def send(self, message: ToEngine) -> None:
        """Never blocks: there is no high-water mark. To an engine that is gone nothing is sent; `fail_all` follows."""
        self._post(encode(message))

    def _post(self, message: bytes) -> None:
        with suppress(zmq.Again):
            self._sender.send(message, zmq.NOBLOCK)

    def _take(self, message: FromEngine) -> Iterator[None]:
        """Handle a message, a little of it at a time."""
        if isinstance(message, Outputs):
            now = time.monotonic()
            for delta in message.deltas:
                self._deliver(delta, now)
                yield
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
        chunk = self._chunk(generation, index, delta)
        self.watch(generation, index, chunk, now)
        if chunk.finish is not None and chunk.finish.reason == "error":
            self._failed(generation, delta.id, chunk.finish.error)
        else:
            generation.push(index, chunk)
            if generation.held > generation.most_held:
                self.abandon(generation)
                generation.overflow()

    def _chunk(self, generation: Generation, index: int, delta: Delta) -> Chunk:
        """The sample's output with its text, if anybody wants it. The engine is told when the text ends the sample, or
        cannot be made."""
        text = generation.texts[index] if generation.texts else None
        if text is None or (generation.abandoned and text.end is None):
            return Chunk.of(delta)
        ended = text.end is not None
        try:
            chunk = text.read(delta)
        except Exception as error:
            logger.error("sample %s failed and was ended; the others continue", delta.id, exc_info=error)
            self._failed(generation, delta.id, text.fail(error))
            return text.read(delta)
        if not ended and text.stopped_at is not None and delta.finish is None:
            self.send(Cut(delta.id, *text.stopped_at))
        return chunk

    def _failed(self, generation: Generation, id: str, why: str | None) -> None:
        self.abandon(generation)
        generation.fail(request_failed(f"{id}: {why}"))


def _refusal(message: Refused) -> ApiError:
    if message.kind == "max_open":
        return overloaded(message.open)
    if message.kind == "max_own":
        return no_places(message.open)
    if message.kind == "rid":
        return rid_taken()
    return (request_failed if message.kind == "engine" else bad_request)(message.message)


def _job(prompt: Prompt, ids: list[str], caller: Caller) -> Job:
    """Samples of one prompt share a seed; the engine distinguishes them by their index."""
    seed = None if prompt.params.seed is not None else secrets.randbits(63)
    params = plain(prompt.params)
    if caller.private:
        params["cache_salt"] = f"{caller.tenant}:{prompt.params.cache_salt or ''}"
    return Job(ids, prompt.ids.tobytes(), params, seed, caller.tenant, prompt.bad_words)
