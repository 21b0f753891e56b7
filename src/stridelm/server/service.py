"""What all routes share: the model's names and tokenizer, the way to the engine, and admission of requests."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from stridelm.builtin import builtin_path
from stridelm.chat.model_chat import ModelChat
from stridelm.config import EngineConfig
from stridelm.params import SamplingParams, Speculation, StructuredOutputs
from stridelm.server.callers import EVERYBODY, Caller
from stridelm.server.config import ServerConfig
from stridelm.server.engine_client import EngineClient, Prompt, with_text
from stridelm.server.errors import ApiError, bad_request, forbidden, no_places, overloaded, timed_out, unavailable
from stridelm.server.fair_line import Lane
from stridelm.server.generation import Generation
from stridelm.server.grammar_sandbox import GrammarSandbox
from stridelm.server.longest import longest_token_bytes
from stridelm.server.messages import Ready, Report
from stridelm.server.metrics import Metrics
from stridelm.server.prompts import Asked, PromptReader
from stridelm.server.shared import Shared
from stridelm.server.side_thread import on_side_thread
from stridelm.server.turns import Turns
from stridelm.server.workers.pool import Died, Pool, TimedLane, TookTooLong
from stridelm.server.workers.wire import Opening, Read, decoded
from stridelm.text.generation_config import read_generation_config
from stridelm.text.tokenizer import Tokenizer
from stridelm.verify import RULES

logger = logging.getLogger(__name__)

MIB = 1 << 20
T = TypeVar("T")

SIMULATED = frozenset(name for name in RULES if RULES.get(name).simulated)
"""Rules that emit tokens that are not the model's."""
SHORT_TEXTS = 4_000
"""Characters, plus TEXT_COSTS per text: longer texts are tokenised on a thread, so that the event loop goes on. This
much takes two milliseconds."""
TEXT_COSTS = 200
SAMPLE_COSTS = 20
"""In characters of text: to begin a sample's text."""
THREADS = 2
"""Maximum requests processed on threads at once."""
QUICK_READING_S, READING_S = 1.0, 10.0
"""How long a worker may take to read a large body before it moves to the slow lane, and at most."""


class EngineLink(Protocol):
    """What the service needs of whoever knows the engine: its supervisor, or in a front-end process what the parent has
    said of it (frontends/link.py)."""

    @property
    def ready(self) -> Ready | None:
        """What the engine reported when it was last loaded."""

    @property
    def engine_client(self) -> EngineClient:
        """The connection to the engine. Raises ApiError while there is none."""

    @property
    def why_unhealthy(self) -> str | None:
        """Why the engine cannot be relied on now."""

    @property
    def report(self) -> Report | None:
        """The engine's last report; None while there is no engine."""


class Peers(Protocol):
    """The other front-end processes."""

    @property
    def open_samples(self) -> int:
        """Their samples that wait or run."""

    def abort(self, rid: str | None, caller: Caller) -> None:
        """End the caller's samples of this name there; without a name, all of the caller's."""

    async def metrics(self) -> bytes:
        """/metrics of all together."""


class Alone:
    """There are no others."""

    open_samples = 0

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def abort(self, rid: str | None, caller: Caller) -> None:
        pass

    async def metrics(self) -> bytes:
        return self._metrics.render()


class Service:
    """Constructed while the engine is loaded, and in front-ends before the process that serves is forked; `connect`
    follows. Raises ValueError, on construction, for a model without a tokenizer."""

    def __init__(self, config: ServerConfig, engine: EngineConfig, metrics: Metrics) -> None:
        """metrics: of this process."""
        self.config = config
        self.engine_config = engine
        path = Path(engine.model) if engine.model is not None else builtin_path()
        self.names = config.names_of(engine.model)
        """The model's names in requests; answers have the first."""
        self.tokenizer = Tokenizer.load(path)
        self.defaults = read_generation_config(engine.generation_config, path)
        """For what a request leaves out."""
        self.defaults.tell()
        if config.chat_template is not None:
            self.tokenizer.hf.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
        self.chat = ModelChat(self.tokenizer, config.tool_call_parser, config.reasoning_parser)
        self.chat.tell()
        self.created = int(time.time())
        self.metrics = metrics
        self._link: EngineLink | None = None
        self.peers: Peers = Alone(self.metrics)
        self.rendered = Shared(lambda: self.peers.metrics())
        """/metrics, which needs no key and takes milliseconds."""
        self.draining = False
        self._sandbox: GrammarSandbox | None = None
        self._getting_ready: asyncio.Task[None] | None = None
        self._bodies: Pool | None = None
        self._token_bytes = longest_token_bytes(self.tokenizer)
        self._threads = Lane(THREADS)
        self._entering: Counter[str] = Counter()
        """Samples that are prepared for the engine, by tenant."""
        self.turns = Turns()
        """For long work on the loop."""

    def connect(self, link: EngineLink, peers: Peers | None = None) -> None:
        """Before anything is served, but not before the engine has been loaded once. Called inside the event loop."""
        assert link.ready is not None
        self._link = link
        self.peers = peers or self.peers
        if link.ready.device.startswith("cuda") and find_spec("llguidance"):  # on a CPU the engine needs the cores
            self._getting_ready = asyncio.create_task(self._grammar_workers().get_ready())

    @property
    def link(self) -> EngineLink:
        assert self._link is not None, "connect comes before the first request"
        return self._link

    @property
    def ready(self) -> Ready:
        """What the engine reported when it was loaded."""
        ready = self.link.ready
        assert ready is not None
        return ready

    @property
    def report(self) -> Report | None:
        """The engine's last report; None while there is no engine."""
        return self.link.report

    @property
    def engine_client(self) -> EngineClient:
        """The connection to the engine. Raises ApiError while there is none."""
        return self.link.engine_client

    @property
    def why_unhealthy(self) -> str | None:
        """Why a request would not be served now."""
        return "the server is shutting down" if self.draining else self.link.why_unhealthy

    @property
    def open_samples(self) -> int:
        """Number of this process's samples that wait or run."""
        try:
            return len(self.engine_client.open)
        except ApiError:
            return 0

    def _grammar_workers(self) -> GrammarSandbox:
        """The workers that try grammars out, made when they are first asked for."""
        if self._sandbox is None:
            self._sandbox = GrammarSandbox(self.ready.model, self.ready.vocab_size)
        return self._sandbox

    def _body_workers(self) -> Pool:
        """The workers that read large bodies. The first takes seconds to start, later ones start at once."""
        if self._bodies is not None:
            return self._bodies
        opening = Opening(
            model=self.ready.model,
            chat_template=self.tokenizer.hf.chat_template if self.config.chat_template is not None else None,
            context=self.ready.context,
            vocab_size=self.ready.vocab_size,
            token_bytes=self._token_bytes,
        )
        quick = TimedLane(places=2, waiting=64, seconds=QUICK_READING_S)
        slow = TimedLane(places=1, waiting=4, seconds=READING_S)
        self._bodies = Pool("bodies", msgspec.json.encode(opening), "large bodies", quick, slow)
        return self._bodies

    @property
    def reader(self) -> PromptReader:
        """Turns prompts into token ids."""
        return PromptReader(self.tokenizer, self.ready.context, self.ready.vocab_size, self._token_bytes)

    async def read(
        self, prompts: Sequence[Asked], caller: Caller, special: bool = True, param: str = "prompt"
    ) -> list[array[int]]:
        """The prompts' token ids. Raises ApiError for one that cannot be served. If cancelled, no further one is
        begun."""
        reader = self.reader
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if sum(map(len, texts)) + TEXT_COSTS * len(texts) <= SHORT_TEXTS:
            return reader.read(prompts, special, param)
        return await self.beside(caller, lambda going_on: reader.read(prompts, special, param, going_on))

    async def beside(self, caller: Caller, work: Callable[[Callable[[], bool]], T]) -> T:
        """Run `work` on a thread, at most THREADS at a time. Its argument tells whether the result is still wanted."""
        await self._threads.enter(caller.tenant)
        left = threading.Event()
        working = asyncio.ensure_future(on_side_thread(lambda: work(lambda: not left.is_set())))

        def done(_: asyncio.Future[T]) -> None:
            self._threads.exit(caller.tenant)
            working.exception()  # marks it as retrieved: nobody may be awaiting it any more

        working.add_done_callback(done)
        try:
            return await asyncio.shield(working)  # if cancelled, the thread still has its place until it ends
        finally:
            left.set()

    async def read_body(self, route: str, body: Sequence[bytes], caller: Caller) -> Read:
        """A large body as read by a worker. Raises ApiError for one that cannot be served."""
        if self.why_unhealthy is not None:
            raise unavailable(self.why_unhealthy)
        with self.entering(1, caller):
            try:
                result = await self._body_workers().do(caller.tenant, f"{route}\n".encode(), *body)
            except TookTooLong:
                raise bad_request(
                    f"the request took longer than {READING_S:g} s to read; send less at once, or token ids"
                ) from None
            except Died:
                raise bad_request("the request took too much memory to read; send less at once") from None
        read = decoded(result)
        if read.error is not None:
            status, message, param = read.error
            raise ApiError(status, message, param=param)
        return read

    @contextmanager
    def entering(self, samples: int, caller: Caller) -> Iterator[None]:
        """Count samples as open while they are prepared for the engine. Raises ApiError if they cannot be served now,
        before any work is done for them."""
        if self.draining:
            raise unavailable("the server is shutting down; send the request to another")
        most, count = self.config.max_queue, len(self.engine_client.open) + self._entering.total()
        if count + samples > most and (samples > most or self._own(caller)):
            raise overloaded(count)
        self._check_places(samples, caller)
        self._entering[caller.tenant] += samples
        try:
            yield
        finally:
            self._entering[caller.tenant] -= samples
            if not self._entering[caller.tenant]:
                del self._entering[caller.tenant]

    def _own(self, caller: Caller) -> int:
        """The caller's samples that are open in this process."""
        own = sum(generation.tenant == caller.tenant for generation, _ in self.engine_client.open.values())
        return own + self._entering[caller.tenant]

    async def generate(
        self, prompts: Sequence[Prompt], caller: Caller = EVERYBODY, rids: Sequence[str] = ()
    ) -> Generation:
        """Start the prompts' samples, all or none. rids: as in EngineClient.submit. Raises ApiError if they cannot be
        served at all, or not now."""
        samples = sum(prompt.params.n for prompt in prompts)
        self._check_priority(prompts, caller)
        for prompt in prompts:
            self._check_rule(prompt.params)
        self._check_scores(prompts)
        with self.entering(samples, caller):
            await self._check_grammars(prompts, caller)
            prompts = await self._with_text(prompts, caller)
            engine_client = self.engine_client
        most, own = self.config.max_queue, self._places(caller)
        limit, loop = self.config.request_timeout, asyncio.get_running_loop()
        began = loop.time()
        try:
            submitted = engine_client.submit(prompts, caller, most, own, rids)
            generation = await asyncio.wait_for(submitted, limit)
        except asyncio.TimeoutError:  # the engine stands still, and has not even accepted it
            assert limit is not None
            raise timed_out(limit) from None
        generation.most_held = int(self.config.max_unread_mib * MIB)
        for prompt in prompts:
            self.metrics.prompt(len(prompt.ids) * prompt.params.n)
        if limit is not None:
            timer = loop.call_at(began + limit, self._expire, engine_client, generation, limit)
            generation.on_end = timer.cancel
        return generation

    def _check_priority(self, prompts: Sequence[Prompt], caller: Caller) -> None:
        min_priority = self.config.min_priority
        if not caller.operator and any(prompt.params.priority < min_priority for prompt in prompts):
            raise forbidden(
                f"priority: with a client's key it may not be more urgent than {min_priority} (min_priority; smaller "
                "numbers go first, at /generate larger ones); leave it out",
                "priority",
            )

    def _places(self, caller: Caller) -> int | None:
        """How many samples the caller may have open; None if there is no limit of its own."""
        limit = self.config.places_per_key
        return None if caller.operator or limit >= self.config.max_queue else limit

    def _check_places(self, more: int, caller: Caller) -> None:
        limit = self._places(caller)
        if limit is not None and self._own(caller) + more > limit:
            raise no_places(limit)

    def _check_scores(self, prompts: Sequence[Prompt]) -> None:
        """Raises ApiError for more prompt log-probabilities than an answer may have."""
        scores = 0
        for prompt in prompts:
            if prompt.params.prompt_logprobs is not None:
                each = 1 + prompt.params.prompt_logprobs + len(prompt.params.logprob_token_ids or ())
                scores += prompt.params.n * len(prompt.ids) * each
        if scores > self.config.max_prompt_scores:
            raise bad_request(
                f"the request asks for {scores} prompt log-probabilities, more than this server's max_prompt_scores "
                f"{self.config.max_prompt_scores}; ask for fewer most likely tokens, or send fewer prompts at once",
                "prompt_logprobs",
            )

    def _check_rule(self, params: SamplingParams) -> None:
        """Raises ApiError for a simulated rule unless the operator has allowed them: its tokens are not the model's."""
        rule = Speculation.of(params.speculation).acceptance
        if rule in SIMULATED and not self.config.enable_synthetic_acceptance:
            raise bad_request(
                f"acceptance {rule}: simulated acceptance is for benchmarks, and this server does not allow it; leave "
                "it out, or start the server with --enable-synthetic-acceptance",
                "speculation",
            )

    async def _check_grammars(self, prompts: Sequence[Prompt], caller: Caller) -> None:
        grammars = {prompt.params.structured_outputs for prompt in prompts} - {None}
        for grammar in grammars:
            assert isinstance(grammar, StructuredOutputs)
            await self._grammar_workers().check(grammar, caller.tenant)

    async def _with_text(self, prompts: Sequence[Prompt], caller: Caller) -> list[Prompt]:
        """The prompts with what turns words into tokens and tokens into text. Raises ApiError for a word that has no
        tokens."""
        each = {id(prompt.params): prompt.params for prompt in prompts}.values()
        words = sum(TEXT_COSTS + len(word) for params in each for word in params.bad_words or ())
        samples = sum(prompt.params.n for prompt in prompts)
        cost = 2 * words + sum(len(stop) for params in each for stop in params.stops) + SAMPLE_COSTS * samples
        try:
            if cost <= SHORT_TEXTS:
                return with_text(prompts, self.tokenizer, self.ready.hidden_size)
            return await self.beside(caller, lambda _: with_text(prompts, self.tokenizer, self.ready.hidden_size))
        except ValueError as error:
            raise bad_request(str(error)) from error

    async def stop(self) -> None:
        """End the workers."""
        if self._sandbox is not None:
            await self._sandbox.close()
        if self._bodies is not None:
            await self._bodies.close()

    async def drain(self) -> None:
        """Refuse new requests, wait until the running ones have finished, and abort those left at the deadline."""
        self.draining = True
        deadline = time.monotonic() + self.config.drain_timeout
        while self.open_samples and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.open_samples:
            logger.warning("aborted %d samples that still ran after drain_timeout", self.open_samples)
            for generation in {id(g): g for g, _ in self.engine_client.open.values()}.values():
                self.engine_client.cut(generation)

    def _expire(self, engine_client: EngineClient, generation: Generation, limit: float) -> None:
        engine_client.abandon(generation)
        generation.fail(timed_out(limit))

    def abort(self, caller: Caller) -> None:
        """End all of the caller's samples in this process; an operator's are everybody's."""
        for generation in {id(one): one for one, _ in self.engine_client.open.values()}.values():
            if caller.operator or generation.tenant == caller.tenant:
                self.engine_client.cut(generation)
