"""The target without HTTP: an engine in this process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from stridelm.bench.drive import Job, Timeline, drive
from stridelm.bench.environment import device_name, dtype_name
from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.record import Completion, Run
from stridelm.bench.serving.target import Ask, Way
from stridelm.bench.stand import check_variants, checkpoint_name, open_engine
from stridelm.bench.variants import plain, read_variant
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams, Speculation
from stridelm.schedule import Configured, within
from stridelm.schedule.step_cost import StepCost


class InProcess:
    name = "in process"

    def __init__(self, engine: Engine, temperature: float) -> None:
        """temperature: of all requests."""
        assert engine.tokenizer is not None
        self._engine, self._tokenizer = engine, engine.tokenizer
        self._temperature = temperature
        cost = StepCost()
        self._fixed = Configured(cost), within(engine.config.itl_target_ms, cost)
        """What plans where depths are given: the engine's own policy must not learn there, between its own runs, what
        steps of all depths take just now."""

    @classmethod
    def open(
        cls,
        model: str | None,
        streams: int,
        temperature: float,
        prefix_caching: bool,
        entries: Iterable[str | None] = (),
        **options: Any,
    ) -> InProcess:
        """entries: those to be measured. options: of the engine."""
        return cls(open_engine(model, streams, entries, prefix_caching=prefix_caching, **options), temperature)

    @property
    def about(self) -> dict[str, str]:
        return {
            "model": checkpoint_name(self._engine),
            "dtype": dtype_name(self._engine),
            "device": device_name(self._engine),
        }

    def plain(self) -> Way:
        return Way("plain", plain(self._engine.loaded.target).speculation, lossless=True, repeats=True)

    def way(self, entry: str | None) -> Way:
        variant = read_variant(entry or "auto", self._engine.loaded.target)
        check_variants(self._engine, [variant])
        if not variant.drafts:
            return self.plain()
        repeats = variant.repeats(self._temperature)
        return Way(
            variant.label,
            variant.speculation,
            variant.lossless,
            repeats,
            variant.simulated,
            drafter=variant.drafter,
            adaptive=variant.speculation.adaptive,
        )

    def check(self, asks: Sequence[Ask]) -> None:
        limit = self._engine.loaded.target.max_length
        rooms = [limit - len(self._tokenizer.encode(ask.prompt.text)) for ask in asks]
        asked = [ask.max_tokens if ask.ignore_eos else 0 for ask in asks]
        cut = [most for most, room in zip(asked, rooms, strict=True) if most > room]
        if cut and min(rooms) > 0:  # `run` says it of a prompt that is too long by itself
            raise ValueError(
                f"max_tokens {max(cut)}: the longest prompt leaves room for {min(rooms)} in the context of {limit}; "
                "lower max_tokens to that, or switch ignore_eos off"
            )

    def run(self, asks: Sequence[Ask], load: Load, arrivals: Sequence[float] | None, way: Way) -> Run:
        jobs = [Job(self._tokenizer.encode(ask.prompt.text), params_of(ask, way.speculation)) for ask in asks]
        with nullcontext() if way.adaptive else self._engine.steps.planner.using(*self._fixed):
            run = drive(self._engine, jobs, load.max_concurrency, arrivals)
        return Run(run.seconds, tuple(self._completion(timeline) for timeline in run.timelines))

    def flush(self) -> None:
        self._engine.forget()

    def losses(self, asks: Sequence[Ask], completions: Sequence[Completion]) -> list[float | None]:
        return [self._loss(ask, each) for ask, each in zip(asks, completions, strict=True)]

    def _loss(self, ask: Ask, completion: Completion) -> float | None:
        if not completion.token_ids:
            return None
        # One token is drawn besides, by plain decoding.
        off = Speculation(drafter="none")
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, speculation=off)
        ids = [*self._tokenizer.encode(ask.prompt.text), *completion.token_ids]
        self._engine.add("loss", ids, params)
        scores = None
        while self._engine.busy:
            for output in self._engine.step():
                scores = output.prompt_logprobs if output.prompt_logprobs is not None else scores
        assert scores is not None
        entries = [(scores[place] or {})[ids[place]].logprob for place in range(len(ids) - completion.tokens, len(ids))]
        return -math.fsum(entries) / len(entries)

    def _completion(self, timeline: Timeline) -> Completion:
        request = timeline.request
        emitted = [when for when, tokens in timeline.emissions if tokens]
        return Completion(
            at=emitted,
            tokens=len(request.output_ids),
            prompt_tokens=len(request.prompt_ids),
            text=self._tokenizer.decode(request.output_ids),
            token_ids=tuple(request.output_ids),
            steps=request.stats.steps,
            drafted=request.stats.drafted,
            accepted=request.stats.accepted,
            finish_reason=request.finish_reason,
        )


def params_of(ask: Ask, speculation: Speculation) -> SamplingParams:
    return SamplingParams(
        temperature=ask.temperature,
        max_tokens=ask.max_tokens,
        ignore_eos=ask.ignore_eos,
        seed=ask.seed,
        speculation=speculation,
    )
