"""The offline API: `LLM.generate` completes a batch, `LLM.chat` answers conversations, `LLM.stream` streams one prompt.
Outputs have vLLM's shape."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from stridelm.builtin import builtin_path
from stridelm.chat.template import habits_of
from stridelm.config import EngineConfig
from stridelm.engine.request_metrics import RequestMetrics
from stridelm.engine.start import start
from stridelm.llm_inputs import Message, Prompt, as_conversations, as_list, encoded, one_each, progress
from stridelm.options import settings
from stridelm.params import SamplingParams
from stridelm.text.generation_config import read_generation_config
from stridelm.text.tokenizer import Tokenizer
from stridelm.text_engine import TextEngine
from stridelm.types import Logprob, StepOutput
from stridelm.values import check_known

logger = logging.getLogger(__name__)


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
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        on_output: Callable[[StepOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, with one parameter set for all or one each; by default `get_default_sampling_params()`.

        prompts: one or several, each a text, token ids, or a mapping with `prompt` or `prompt_token_ids`.
        use_tqdm: whether a bar shows the progress of several prompts, where there is a terminal; or a callable that
            makes one, as `tqdm.tqdm` does.
        on_output: called with every step's outputs as they arrive.

        Outputs are in the prompts' order.
        Raises ValueError before anything runs if any prompt or parameter cannot be served.
        """
        batch = as_list(prompts)
        each = one_each(self.get_default_sampling_params() if sampling_params is None else sampling_params, len(batch))
        jobs: list[RequestOutput] = []
        try:
            for prompt, sampling in zip(batch, each, strict=True):
                jobs.append(self._add(prompt, sampling))
        except BaseException:
            self._abort(jobs)
            raise
        return self._run(jobs, use_tqdm, on_output)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_output: Callable[[StepOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, written as text by the model's chat template; the rest is as in `generate`.

        messages: a conversation, a list of mappings with `role` and `content`; or a list of conversations.
        chat_template: a Jinja template in place of the model's. It is a program: give only those you trust.
        add_generation_prompt: begin the answer's message. continue_final_message: continue the last message instead;
            then add_generation_prompt must be False.
        tools: for the template. chat_template_kwargs: its variables.

        Raises ValueError if there is no template, or if it refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message begins no other message: pass add_generation_prompt=False")
        tokenizer = self._tokenizer()
        prompts = list[Prompt]()
        for conversation in as_conversations(messages):
            how = tools, add_generation_prompt, continue_final_message, chat_template_kwargs
            given = habits_of(tokenizer, chat_template).messages(conversation)
            text = tokenizer.render_chat(given, *how, template=chat_template)
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_output=on_output)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, transformers' own. Raises ValueError if the engine was started without it."""
        return self._tokenizer().hf

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Complete one prompt; yields its growing output after every step that added to it.

        Leaving the iterator early aborts the request.
        """
        (sampling,) = one_each(self.get_default_sampling_params() if sampling_params is None else sampling_params, 1)
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
        text, ids = encoded(prompt, self.engine.tokenizer)
        name = str(next(self._ids))
        job = RequestOutput(name, text, list(ids), [CompletionOutput(i) for i in range(params.n)])
        seed: int | None = None
        for index in range(params.n):
            request = self.text_engine.add(f"{name}.{index}", ids, params, sample_index=index, seed=seed)
            seed = request.seed
            job.outputs[index].logprobs = None if params.logprobs is None else []
            self._open[request.id] = (job, index)
        return job

    def _tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise ValueError("the engine was started with skip_tokenizer_init; leave it out")
        return self.engine.tokenizer

    def _run(
        self,
        jobs: list[RequestOutput],
        use_tqdm: bool | Callable[..., Any],
        on_output: Callable[[StepOutput], None] | None,
    ) -> list[RequestOutput]:
        by_id = {f"{job.request_id}.{i}": job for job in jobs for i in range(len(job.outputs))}
        open_jobs = {job.request_id for job in jobs}
        try:
            with progress(use_tqdm, len(jobs)) as advance:
                while not by_id.keys().isdisjoint(self._open):
                    for output in self._step():
                        job = by_id.get(output.request.id)
                        if job is None:
                            continue
                        if on_output is not None:
                            on_output(output)
                        if job.finished and job.request_id in open_jobs:
                            open_jobs.remove(job.request_id)
                            advance(1)
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
