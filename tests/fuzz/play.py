"""Runs a case through an engine and records all outputs, and every step.

The engine's model and pool are built anew for every case: on checkpoints this small that takes ten milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from fuzz.cases import IN_EIGHT_BITS, Ask, BadRequest, Case, ClosedStream, Raises
from fuzz.checkpoints import directory, head_directories
from fuzz.found import Found, guarded
from stridelm import LLM, SamplingParams
from stridelm.attention import BACKENDS
from stridelm.batch import CANDIDATE, Draft, ForwardBatch
from stridelm.draft import DRAFTERS
from stridelm.engine.engine import Engine
from stridelm.engine.outcome import Outcome
from stridelm.schedule.adaptive import Adaptive
from stridelm.text_engine import TextEngine
from stridelm.types import Logprob, Request, Span, StepOutput, StepPlan
from support.doubles import bounds
from support.doubles.depths import RandomChoices
from support.doubles.faults import guilty_from, plant
from support.doubles.stand import CAPTURE_NOTHING
from support.doubles.tree_drafter import NAME as TREE
from support.doubles.tree_drafter import RandomTreeDrafter
from support.doubles.tree_drafter import registered as trees_registered

MAX_STEPS = 6000
"""More than any case needs, with one row per step."""
ROOM = 1600
"""Number of tokens that a pool holds unless a case sets it."""


@dataclass
class Look:
    """Record of one step for one request."""

    known: tuple[int, ...]
    """Prompt and output before the step."""
    decides: bool
    candidates: dict[int, tuple[int, int]]
    """Valid candidate row -> (token, parent row; -1 the last real row)."""
    probes: list[int]
    """Tokens of the valid probe rows, in order."""
    tokens: list[int]
    """The emitted tokens, before stop rules cut them."""


@dataclass
class Said:
    """Everything that one request received."""

    request: Request | None = None
    """None if it was refused."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    states: list[torch.Tensor] = field(default_factory=list)
    aborted: bool = False
    over: bool = False
    looks: list[Look] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.request is not None and self.request.finish_reason == "error"

    @property
    def cut(self) -> bool:
        """Whether it ended before its output was complete."""
        return self.aborted or self.failed

    def take(self, output: StepOutput) -> None:
        if self.over or self.aborted:
            raise Found("engine", f"request {output.request.id} got {output.new_token_ids} after its end")
        self.over = output.finished
        self.tokens += output.new_token_ids
        self.text += output.text
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.hidden_states is not None:
            self.states.append(output.hidden_states)


@dataclass
class Stream:
    ask: Ask
    tokens: list[int]
    text: str


@dataclass
class Play:
    said: list[Said]
    streams: list[Stream]
    refused: int
    preemptions: int
    accepted: int


@contextmanager
def registrations() -> Iterator[None]:
    """The tests' tree drafter and bounds backend are registered while the context lasts."""
    with ExitStack() as stack:
        if TREE not in DRAFTERS:
            stack.enter_context(trees_registered())
        if bounds.BOUNDS not in BACKENDS:
            stack.enter_context(bounds.bounds_registered())
        yield


def play(case: Case, truths: dict[int, list[int]] | None = None) -> Play:
    """Run the case to its end. truths: plain decoding's output for some requests, for the tree drafter.

    Raises Found for any misbehaviour of the engine.
    """
    with registrations():
        for index, tokens in (truths or {}).items():
            ask = case.requests[index]
            RandomTreeDrafter.teach(list(ask.prompt), ask.params.get("seed"), ask.sample, tokens)
        return guarded("engine", lambda: _Player(case).run())


def engine_options(case: Case) -> dict[str, Any]:
    """All options of the case's engine."""
    defaults: dict[str, Any] = {
        "dtype": case.dtype,
        "strict": True,
        "drafter": "none",
        "check_drafting": False,  # of heads with random weights
        "mask_token_id": case.checkpoint.vocab - 1,
        "drafter_model": head_directories(case.checkpoint) or None,
        "skip_tokenizer_init": not case.checkpoint.speaks,
        "num_pages": ROOM // case.engine.get("page_size", 16),
    }
    if case.device != "cpu" and not CAPTURE_NOTHING & case.engine.keys():
        defaults["capture"] = "lazy"  # a case needs few graphs
    return defaults | case.engine


def choose_depths(engine: Engine, seed: int | None) -> None:
    """Have depths chosen at random; without a seed by the engine's own policy, as if steps took as long as they have
    rows: a case must not depend on a clock."""
    policy = engine.adaptive = engine.adaptive or Adaptive(engine.cost)
    engine.steps.planner.depths = policy if seed is None else RandomChoices(seed=seed)
    landed = policy.landed

    def by_rows(spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
        landed(spans, accepted, 1e-3 + 1e-4 * sum(span.rows for span in spans))

    policy.landed = by_rows  # type: ignore[method-assign]


class _Player:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.llm = LLM(str(directory(case.checkpoint)), **engine_options(case))
        self.engine, self.text = self.llm.engine, self.llm.text_engine
        self.said = [Said() for _ in case.requests]
        self.streams: list[Stream] = []
        self.refused = self.steps = 0
        self._step = self.text.step
        self.text.step = self._listen  # type: ignore[method-assign]  # a stream's steps serve all requests
        if case.chooses:
            choose_depths(self.engine, case.policy)
        if case.traced:
            self.engine.tracer = self._trace

    def run(self) -> Play:
        case, engine = self.case, self.engine
        asks = enumerate(case.requests)
        events: list[tuple[int, int, Any]] = [(ask.arrival, index, None) for index, ask in asks]
        events += [(fault.at, len(case.requests), fault) for fault in case.faults if not isinstance(fault, Raises)]
        for fault in case.faults:
            if isinstance(fault, Raises):
                plant(engine, fault.stage, guilty_from(fault.tokens, f"r{fault.request}"))
        pending = sorted(events, key=lambda event: event[:2])
        now = 0
        while pending or engine.busy:
            while pending and pending[0][0] <= now:
                _, index, fault = pending.pop(0)
                if fault is None:
                    self._add(index)
                elif isinstance(fault, BadRequest):
                    self._add_bad(fault)
                else:
                    self._open(fault)
            self._abort(now)
            if engine.busy:
                self.text.step()
            now += 1
        self._check_nothing_left()
        return Play(self.said, self.streams, self.refused, engine.stats.preemptions, engine.stats.accepted)

    def _listen(self) -> list[StepOutput]:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Found("engine", f"it is not done after {MAX_STEPS} steps")
        outputs = self._step()
        for output in outputs:
            if output.request.id in self._names:
                self.said[int(output.request.id[1:])].take(output)
        return outputs

    @property
    def _names(self) -> set[str]:
        return {said.request.id for said in self.said if said.request is not None}

    def _add(self, index: int) -> None:
        ask = self.case.requests[index]
        try:
            params = SamplingParams(**ask.params, speculation=ask.speculation)
            added = self.text.add(f"r{index}", list(ask.prompt), params, sample_index=ask.sample)
            self.said[index].request = added
        except ValueError:
            self.refused += 1
            self.engine.check()

    def _add_bad(self, fault: BadRequest) -> None:
        queued = len(self.engine.queue.running) + len(self.engine.queue.waiting)
        try:
            self.text.add("bad", list(fault.prompt), SamplingParams(**fault.params))
        except ValueError:
            self.engine.check()
            if len(self.engine.queue.running) + len(self.engine.queue.waiting) != queued:
                raise Found("engine", f"refusing {fault} changed the queue") from None
        else:
            raise Found("engine", f"{fault} was not refused")

    def _open(self, fault: ClosedStream) -> None:
        try:
            params = SamplingParams(**fault.ask.params, speculation=fault.ask.speculation)
            stream = self.llm.stream(list(fault.ask.prompt), params)
        except ValueError:
            self.refused += 1
            return
        heard = Stream(fault.ask, [], "")
        for _, output in zip(range(fault.after), stream):
            heard.tokens, heard.text = list(output.outputs[0].token_ids), output.outputs[0].text
        stream.close()
        self.engine.check()
        self.streams.append(heard)

    def _abort(self, now: int) -> None:
        for index, ask in enumerate(self.case.requests):
            said = self.said[index]
            if ask.abort is not None and ask.abort <= now and said.request is not None and not said.aborted:
                if said.request.finish_reason is None:
                    said.aborted = self.text.abort(said.request.id)
                    if not said.aborted:
                        raise Found("engine", f"request {index} runs and cannot be aborted")

    def _trace(self, plan: StepPlan, draft: Draft, batch: ForwardBatch, outcome: Outcome) -> None:
        for row, span in enumerate(plan.spans):
            if span.request.id not in self._names:
                continue
            columns = (draft.tokens, draft.parents, draft.roles, draft.valid)
            rows = list(zip(*(column[row].tolist() for column in columns)))
            candidates = {n: (t, p) for n, (t, p, role, live) in enumerate(rows) if live and role == CANDIDATE}
            probes = [t for t, _, role, live in rows if live and role != CANDIDATE]
            look = Look(tuple(span.request.token_ids), span.decides, candidates, probes, outcome.tokens[row])
            if look.tokens and not look.decides:
                raise Found("engine", f"a span that does not decide emitted {look.tokens}")
            self.said[int(span.request.id[1:])].looks.append(look)

    def _check_nothing_left(self) -> None:
        engine = self.engine
        engine.check()
        held = {group: count["held"] for group, count in engine.ledger.counts().items() if count["held"]}
        if held:
            raise Found("ledger", f"no request is left but pages are held: {held}")
        if self.text._texts or engine.roster.inside._prompts or engine.steps.flights:
            raise Found("engine", f"no request is left but state remains of {list(self.text._texts)}")
        lost = [i for i, said in enumerate(self.said) if said.request and said.request.finish_reason is None]
        if lost:
            raise Found("engine", f"requests {lost} were forgotten")
        guilty = {fault.request for fault in self.case.faults if isinstance(fault, Raises)}
        failed = {i for i, said in enumerate(self.said) if said.request and said.failed}
        if failed - guilty or (engine.stats.failed_steps and not guilty):
            raise Found("engine", f"{engine.stats.failed_steps} steps failed, for good requests {failed - guilty}")


@lru_cache(maxsize=256)
def _reference(key: str, directory: str, options: tuple[tuple[str, Any], ...]) -> LLM:
    return LLM(directory, **dict(options))


def alone(case: Case, ask: Ask, plain: bool = True) -> Said:
    """The output of a request by itself in an engine with default settings, one prefill chunk and no prefix cache;
    plain: without a draft."""
    masks, context = case.engine.get("mask_token_id", case.checkpoint.vocab - 1), case.engine.get("max_model_len", 256)
    attention = str(case.engine.get("attention", "auto"))
    options: dict[str, Any] = {
        "dtype": case.dtype,
        "device": case.device,
        "attention": "reference" if attention == bounds.BOUNDS else attention,  # equal bits hold only within a backend
        "deterministic": True,
        "drafter": "none",
        "mask_token_id": masks,
        "max_model_len": context,
        "enable_prefix_caching": False,
        "num_pages": 30,
        "skip_tokenizer_init": engine_options(case)["skip_tokenizer_init"],
        **{option: case.engine[option] for option in IN_EIGHT_BITS if option in case.engine},
    }

    if case.device != "cpu":
        options["enforce_eager"] = True  # compares the case engine's captured steps with eager ones

    def run() -> Said:
        text = TextEngine(_reference(repr(options), str(directory(case.checkpoint)), tuple(options.items())).engine)
        said = Said()
        speculation = {"drafter": "none"} if plain else ask.speculation
        asked = {name: value for name, value in ask.params.items() if name != "target_tps"}  # nothing is chosen
        params = SamplingParams(**asked, speculation=speculation)
        said.request = text.add("alone", list(ask.prompt), params, sample_index=ask.sample)
        while text.engine.busy:
            for output in text.step():
                said.take(output)
        return said

    try:
        return guarded("alone", run)
    except Found:
        _reference.cache_clear()  # it may hold state of the broken step
        raise
