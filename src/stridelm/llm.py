"""The offline API: `LLM.generate` completes a batch, `LLM.stream` streams one prompt. Outputs have vLLM's shape."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from stridelm.builtin import builtin_path
from stridelm.config import EngineConfig
from stridelm.engine.request_metrics import RequestMetrics
from stridelm.engine.start import start
from stridelm.options import settings
from stridelm.params import SamplingParams
from stridelm.text.generation_config import read_generation_config
from stridelm.text_engine import TextEngine
from stridelm.types import Logprob, StepOutput
from stridelm.values import check_known, shortened, token_ids

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


@dataclass(slots=True)
class CompletionOutput:
    """One sample of one prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """What went wrong, if the finish reason is "error"; the rest of the batch is not affected."""
    metrics: RequestMetrics | None = None
    _states: list[torch.Tensor] = field(default_factory=list, repr=False, compare=False)
    """Chunks as they arrived, the prompt's included: concatenated on first access instead of at every step."""

    @property
    def hidden_states(self) -> torch.Tensor | None:
        """[P + T - 1, H] float32: one row per computed position of prompt and output, that is, all but the last."""
        if len(self._states) > 1:
            self._states = [torch.cat(self._states)]
        return self._states[0] if self._states else None


@dataclass(slots=True)
class RequestOutput:
    """All samples of one prompt. `metrics` are the first sample's; every sample has its own."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False

    @property
    def metrics(self) -> RequestMetrics | None:
        return self.outputs[0].metrics


class LLM:
    """A model and its engine. Keyword arguments are EngineConfig's fields; unknown ones are refused."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        check_known(options, settings(EngineConfig), "option")
        config = EngineConfig(model=None if model is None else str(model), **options)
        path = Path(config.model) if config.model is not None else builtin_path()
        self._defaults = read_generation_config(config.generation_config, path)
        self._announced = False
        self.engine = start(config)
        self.text_engine = TextEngine(self.engine)
        self._ids = itertools.count()
        self._open: dict[str, tuple[RequestOutput, int]] = {}
        """Unfinished samples by request id, so that every output reaches its sample whichever call steps the engine."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[StepOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, given as text or token ids, with one parameter set for all or one each; by default
        `get_default_sampling_params()`.

        Outputs are in the prompts' order. on_output is called with every step's outputs as they arrive.
        Raises ValueError before anything runs if any prompt or parameter cannot be served.
        """
        batch = _as_list(prompts)
        each = _one_each(self.get_default_sampling_params() if params is None else params, len(batch))
        jobs: list[RequestOutput] = []
        try:
            for prompt, sampling in zip(batch, each, strict=True):
                jobs.append(self._add(prompt, sampling))
        except BaseException:
            self._abort(jobs)
            raise
        return self._run(jobs, on_output)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Complete one prompt; yields its growing output after every step that added to it.

        Leaving the iterator early aborts the request.
        """
        (sampling,) = _one_each(self.get_default_sampling_params() if params is None else params, 1)
        if sampling.n != 1:
            raise ValueError(f"stream gives one sample; n is {sampling.n}; use generate")
        job = self._add(prompt, sampling)
        outputs = self._stream(job)
        next(outputs)  # start it, so that dropping it unread also aborts the request
        return outputs

    def get_default_sampling_params(self) -> SamplingParams:
        """A new set of the checkpoint's recommended parameters (`generation_config`). Parameters passed explicitly do
        not inherit from it."""
        if not self._announced:
            self._announced = True
            self._defaults.tell()
        return SamplingParams(**self._defaults.values)

    def check(self) -> None:
        """Raise RuntimeError naming the leak if the ledger does not balance."""
        self.engine.check()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for request in [*self.engine.queue.running, *self.engine.queue.waiting]:
            self.text_engine.abort(request.id)

    def _add(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """Queue one prompt's samples. They share a seed and differ by sample index; equal prefixes share pages."""
        text, ids = self._encode(prompt)
        name = str(next(self._ids))
        job = RequestOutput(name, text, list(ids), [CompletionOutput(i) for i in range(params.n)])
        seed: int | None = None
        for index in range(params.n):
            request = self.text_engine.add(f"{name}.{index}", ids, params, sample_index=index, seed=seed)
            seed = request.seed
            job.outputs[index].logprobs = None if params.logprobs is None else []
            self._open[request.id] = (job, index)
        return job

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str):
            return None, token_ids("the prompt", prompt)
        if self.engine.tokenizer is None:
            raise ValueError("the engine was started with skip_tokenizer_init; give prompts as token ids")
        return prompt, self.engine.tokenizer.encode(prompt)

    def _run(self, jobs: list[RequestOutput], on_output: Callable[[StepOutput], None] | None) -> list[RequestOutput]:
        ids = {f"{job.request_id}.{i}" for job in jobs for i in range(len(job.outputs))}
        try:
            while not ids.isdisjoint(self._open):
                for output in self._step():
                    if on_output is not None and output.request.id in ids:
                        on_output(output)
        except BaseException:
            self._abort(jobs)
            raise
        return jobs

    def _stream(self, job: RequestOutput) -> Generator[RequestOutput, None, None]:
        request = self.engine.queue.get(f"{job.request_id}.0")
        assert request is not None
        sample, shown = job.outputs[0], 0
        try:
            yield job
            while True:
                # While the caller held the iterator, another call may have stepped this request as well.
                while len(sample.token_ids) == shown and not job.finished:
                    self._step()
                if len(sample.token_ids) == shown:
                    if sample.error is not None:
                        yield job
                    return
                shown = len(sample.token_ids)
                sample.metrics = RequestMetrics.of(request)
                yield job
        finally:
            self._abort([job])

    def _step(self) -> list[StepOutput]:
        """One step of the engine, its outputs added to their samples."""
        outputs = self.text_engine.step()
        for output in outputs:
            if output.request.id in self._open:
                _take(*self._open[output.request.id], output)
                if output.finished:
                    del self._open[output.request.id]
        return outputs

    def _abort(self, jobs: list[RequestOutput]) -> None:
        for job in jobs:
            for i in range(len(job.outputs)):
                self._open.pop(f"{job.request_id}.{i}", None)
                self.text_engine.abort(f"{job.request_id}.{i}")


def _take(job: RequestOutput, index: int, output: StepOutput) -> None:
    """Add one step's output to a sample."""
    sample = job.outputs[index]
    sample.text += output.text
    sample.token_ids += output.new_token_ids
    if output.logprobs is not None and sample.logprobs is not None:
        sample.logprobs += output.logprobs
        gained = sum(entry[token].logprob for entry, token in zip(output.logprobs, output.new_token_ids, strict=True))
        sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + gained
    if output.hidden_states is not None:
        sample._states.append(output.hidden_states)
    if output.prompt_logprobs is not None and index == 0:
        job.prompt_logprobs = list(output.prompt_logprobs)
    if output.finished:
        request = output.request
        sample.finish_reason, sample.stop_reason = request.finish_reason, request.stop_reason
        sample.error = request.error
        sample.metrics = RequestMetrics.of(request)
        job.finished = all(other.finish_reason for other in job.outputs)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, text or ids, becomes a batch of one. Arrays and tensors count as lists of ids."""
    if isinstance(prompts, str):
        return [prompts]
    value: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(value, bytes | bytearray | Mapping | Set) or not isinstance(value, Iterable):
        raise ValueError(f"prompts must be text or lists of token ids; got {shortened(value)}")
    items = list(value)
    if not items:
        raise ValueError("no prompts were given; give at least one")
    if isinstance(items[0], Number) and all(isinstance(item, Number) for item in items):
        return [items]
    return items


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    sets = list(params) if isinstance(params, Sequence) else [params]
    wrong = [one for one in sets if not isinstance(one, SamplingParams)]
    if wrong:
        raise ValueError(f"params must be SamplingParams, one for all or one each; got {shortened(wrong[0])}")
    if len(sets) != count:
        raise ValueError(f"{len(sets)} parameter sets for {count} prompts; give one for all or one each")
    return sets
