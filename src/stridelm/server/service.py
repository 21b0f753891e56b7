"""What all routes share: the model's names and tokenizer, the engine behind its supervisor, and who may come in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from stridelm.builtin import builtin_path
from stridelm.config import EngineConfig
from stridelm.params import StructuredOutputs
from stridelm.server.callers import EVERYBODY, Caller
from stridelm.server.config import ServerConfig
from stridelm.server.errors import ApiError, forbidden, no_places, overloaded, timed_out, unavailable
from stridelm.server.grammar_desk import Desk
from stridelm.server.link import Generation, Link, Sample
from stridelm.server.messages import Ready, Report
from stridelm.server.metrics import Metrics
from stridelm.server.supervisor import Supervisor
from stridelm.text.generation_config import read_generation_config
from stridelm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MIB = 1 << 20
LONG_TEXT = 20_000
"""Characters; what is longer is tokenised beside the event loop, which goes on meanwhile."""


class Service:
    """Raises ValueError, on construction, for a model without a tokenizer."""

    def __init__(self, config: ServerConfig, engine: EngineConfig) -> None:
        self.config = config
        self.engine_config = engine
        path = Path(engine.model) if engine.model is not None else builtin_path()
        self.names: tuple[str, ...] = tuple(config.served_model_name or (_name_of(engine.model),))
        """What the model may be called in requests; the first is what answers say."""
        self.tokenizer = Tokenizer.load(path)
        self.defaults = read_generation_config(engine.generation_config, path)
        """For what a request leaves out."""
        self.defaults.tell()
        if config.chat_template is not None:
            self.tokenizer.hf.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0])
        self.supervisor = Supervisor(
            engine,
            config.max_restarts,
            config.engine_timeout,
            watch=self.metrics.watch,
            heard=self._hear,
            gone=self._lose,
            restarted=self.metrics.restarted,
            log_json=config.log_json,
        )
        self.report: Report | None = None
        """The engine's last word on itself."""
        self.draining = False
        self._desk: Desk | None = None

    @property
    def ready(self) -> Ready:
        """What the engine said when it was loaded."""
        assert self.supervisor.ready is not None, "the server is built before it serves"
        return self.supervisor.ready

    @property
    def link(self) -> Link:
        """The line to the engine. Raises ApiError while there is none."""
        return self.supervisor.link

    @property
    def why_unhealthy(self) -> str | None:
        """Why a request would not be served now."""
        return "the server is shutting down" if self.draining else self.supervisor.why_unhealthy

    @property
    def open_samples(self) -> int:
        """Samples that wait or run."""
        try:
            return len(self.link.open)
        except ApiError:
            return 0

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises ValueError for text that is not valid Unicode."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def generate(self, samples: Sequence[Sample], caller: Caller = EVERYBODY) -> Generation:
        """Start the samples, all or none. Raises ApiError if they cannot be served, or not now."""
        if self.draining:
            raise unavailable("the server is shutting down; send the request to another")
        self._check_priority(samples, caller)
        await self._check_grammars(samples)
        link = self.link
        if len(link.open) + len(samples) > self.config.max_queue:
            raise overloaded(len(link.open))
        self._check_places(link, len(samples), caller)
        generation = await link.submit(samples, caller.tenant)
        generation.most_held = int(self.config.max_unread_mib * MIB)
        for sample in samples:
            self.metrics.prompt(len(sample.prompt_ids))
        limit = self.config.request_timeout
        if limit is not None:
            timer = asyncio.get_running_loop().call_later(limit, self._expire, link, generation, limit)
            generation.on_end = timer.cancel
        return generation

    def _check_priority(self, samples: Sequence[Sample], caller: Caller) -> None:
        least = self.config.min_priority
        if not caller.operator and any(sample.params.priority < least for sample in samples):
            raise forbidden(
                f"priority: a client's key may ask for nothing more urgent than {least} (min_priority; smaller numbers "
                "go first, at /generate larger ones); leave it out",
                "priority",
            )

    def _check_places(self, link: Link, more: int, caller: Caller) -> None:
        most = self.config.places_per_key
        if not caller.operator and most < self.config.max_queue:
            own = sum(generation.tenant == caller.tenant for generation, _ in link.open.values())
            if own + more > most:
                raise no_places(most)

    async def _check_grammars(self, samples: Sequence[Sample]) -> None:
        asked = {sample.params.structured_outputs for sample in samples} - {None}
        for structured in asked:
            assert isinstance(structured, StructuredOutputs)
            if self._desk is None:
                self._desk = Desk(self.ready.model, self.ready.vocab_size)
            await self._desk.check(structured)

    async def stop(self) -> None:
        """End the engine and whatever else was started."""
        if self._desk is not None:
            await self._desk.close()
        await self.supervisor.stop()

    async def drain(self) -> None:
        """Take nothing in any more, and wait until what runs has ended: by itself, or at the deadline by being cut."""
        self.draining = True
        deadline = time.monotonic() + self.config.drain_timeout
        while self.open_samples and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.open_samples:
            logger.warning("%d samples still ran when their time was over; they are cut", self.open_samples)
            for generation in {id(g): g for g, _ in self.link.open.values()}.values():
                self.link.cut(generation)

    def _expire(self, link: Link, generation: Generation, limit: float) -> None:
        link.abandon(generation)
        generation.fail(timed_out(limit))

    def _lose(self) -> None:
        self.report = None
        self.metrics.engine_down()

    def _hear(self, report: Report) -> None:
        self.report = report
        self.metrics.heard(report)


def _name_of(model: str | None) -> str:
    return "built-in" if model is None else Path(model).resolve().name
