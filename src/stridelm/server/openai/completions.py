"""POST /v1/completions."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.params import SamplingParams
from stridelm.server.callers import caller_of
from stridelm.server.chunk import Chunk
from stridelm.server.engine_client import Prompt
from stridelm.server.errors import bad_request
from stridelm.server.gather import Gathered, speculation_of
from stridelm.server.large import LargeBodies, prompts_read
from stridelm.server.messages import SCORED, Score, Scores, top_scores
from stridelm.server.openai.schemas import CompletionRequest
from stridelm.server.openai.shared import Heading, StreamUsage, Usage, check_model, metrics_of, reply, usage_of
from stridelm.server.replies import to_json, while_connected
from stridelm.server.sample_text import prompt_scores
from stridelm.server.service import Service
from stridelm.server.turns import Turn

router = APIRouter(route_class=LargeBodies)


@router.post("/v1/completions", response_model=None)
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Complete one prompt or several."""
    service: Service = request.app.state.service
    check_model(service, body.model)
    params = _params(body, service)
    prompts = await _prompts(body, request)
    asked = [Prompt(ids, params) for ids in prompts]
    return await reply(request, asked, _Answer(service, body, prompts, params), bool(body.stream))


def _params(body: CompletionRequest, service: Service) -> SamplingParams:
    """Raises ApiError for parameters that cannot be served."""
    if body.suffix:
        raise bad_request("suffix: this server can only append to a text; leave suffix out", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of: samples are not ranked; leave it out, or make it equal to n", "best_of")
    if body.stream and body.echo and body.logprobs is not None:
        raise bad_request("echo with logprobs cannot be streamed; leave one of the three out", "stream")
    more: dict[str, Any] = {"max_tokens": 16 if body.max_tokens is None else body.max_tokens}
    if body.max_tokens == 0:  # the step that scores a prompt also draws a token, which is not returned
        if not body.echo:
            raise bad_request("max_tokens 0 gives nothing without echo; raise it, or set echo", "max_tokens")
        more["max_tokens"] = 1
    if body.logprobs is not None:
        more["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            more["prompt_logprobs"] = body.logprobs
    return body.sampling(service.defaults, **more)


async def _prompts(body: CompletionRequest, request: Request) -> list[array[int]]:
    """Each prompt's token ids. Raises ApiError for prompts that cannot be served."""
    many = asked_prompts(body)
    read = prompts_read(request)
    if read is not None:
        return read
    service: Service = request.app.state.service
    special = body.add_special_tokens is not False
    caller = caller_of(request)
    with service.entering(len(many) * (body.n or 1), caller):
        return await while_connected(request, service.read(many, caller, special))


def asked_prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts, as a list whether there is one or several. Raises ApiError for parameters without effect."""
    prompt: Any = body.prompt
    many: list[str] | list[list[int]]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        many = [prompt]
    else:
        many = prompt
    if body.add_special_tokens is False and not isinstance(many[0], str):
        raise bad_request("add_special_tokens would have no effect on token ids; leave it out", "add_special_tokens")
    return many


class _Answer:
    keeps = False

    def __init__(
        self, service: Service, body: CompletionRequest, prompts: Sequence[array[int]], params: SamplingParams
    ) -> None:
        self._heading = Heading(service, "cmpl", "text_completion", body)
        self._service = service
        self._body = body
        self._prompts = prompts
        self._n = params.n
        self._texts: dict[int, str] = {}
        """Index of a prompt -> its text, for echo."""
        self._silent = body.max_tokens == 0
        """Whether the one token that is drawn is left out."""
        self._lengths = [0] * (len(prompts) * params.n)
        """Characters of each sample that have been sent."""
        self._beside = StreamUsage(body, Usage(sum(map(len, prompts))), len(self._lengths))

    def whole(self, samples: Sequence[Gathered]) -> dict[str, Any]:
        """The answer to a request that is not streamed, without its choices."""
        usage = usage_of(self._prompts, samples, self._n, spare=int(self._silent))
        metrics = metrics_of([sample.ended.metrics for sample in samples])
        return self._heading.around(choices=[], usage=usage.as_json(), **metrics)

    # replies.Streamed

    def opening(self) -> bytes:
        if not self._body.echo:
            return b""
        texts = [self._prompt_text(index) for index in range(len(self._lengths))]
        self._lengths = [len(text) for text in texts]
        return b"".join(self._heading.event([_choice(index, text, None)]) for index, text in enumerate(texts))

    def events(self, arrived: Sequence[tuple[int, Chunk]]) -> bytes:
        return b"".join([self._event(index, chunk) for index, chunk in arrived])

    def closing(self) -> bytes:
        last = self._beside.last()
        return self._heading.event([], last) if last else b""

    def _event(self, index: int, chunk: Chunk) -> bytes:
        usage, finish, lengths = self._beside.usage, chunk.finish, self._lengths
        if finish is not None and index % self._n == 0:
            usage.cached += finish.metrics.cached_tokens
        if self._silent:
            chunk = Chunk(finish=finish)
        usage.completion += len(chunk.token_ids)
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = legacy_logprobs(chunk.logprobs or [], self._body.logprobs, lengths[index])
            # Where each token's text begins in what was sent, however many tokens an event has.
            begins = accumulate(map(len, chunk.pieces), initial=lengths[index])
            logprobs["text_offset"] = [begin for begin, _ in zip(begins, chunk.pieces)]
        text = chunk.text
        lengths[index] += len(text)
        choice = _choice(index, text, logprobs)
        if self._body.return_token_ids:
            choice["token_ids"], choice["token_texts"] = chunk.token_ids, chunk.pieces
            choice["accepted"], choice["steps"] = chunk.accepted, chunk.steps
        if finish is not None:
            choice["finish_reason"], choice["stop_reason"] = finish.reason, finish.stop_reason
            choice["speculation"] = speculation_of(finish.metrics)
            self._beside.end(finish.metrics)
        return self._heading.event([choice], self._beside.with_choice())

    async def choice(self, index: int, sample: Gathered, turn: Turn) -> dict[str, Any]:
        """The choice of one sample."""
        prompt_ids = self._prompts[index // self._n]
        text = "" if self._silent else sample.text
        ids = [] if self._silent else sample.token_ids
        if self._body.echo:
            text = self._prompt_text(index) + text
        wanted = self._body.logprobs
        logprobs = None if wanted is None else await self._all_logprobs(prompt_ids, sample, wanted, turn)
        choice = _choice(index, text, logprobs)
        choice["finish_reason"], choice["stop_reason"] = sample.ended.reason, sample.ended.stop_reason
        if self._silent:
            choice["finish_reason"] = "length"
        if self._body.return_token_ids:
            choice["token_ids"], choice["prompt_token_ids"] = ids, prompt_ids.tolist()
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = entries = list[msgspec.Raw]()
            for packed in sample.prompt_logprobs or []:
                entries += [
                    msgspec.Raw(to_json(_by_id(entry))) for entry in prompt_scores(packed, self._service.tokenizer)
                ]
                await turn.breathe()
        choice["speculation"] = speculation_of(sample.ended.metrics)
        return choice

    def _prompt_text(self, index: int) -> str:
        prompt = index // self._n
        if prompt not in self._texts:
            self._texts[prompt] = self._service.tokenizer.decode(self._prompts[prompt].tolist())
        return self._texts[prompt]

    async def _all_logprobs(self, prompt_ids: array[int], sample: Gathered, top: int, turn: Turn) -> dict[str, Any]:
        """The sample's log-probabilities, with the prompt's if it is echoed."""
        merged, offset = legacy_logprobs([], top, 0), 0
        async for scores in self._scores(prompt_ids, sample):
            more = legacy_logprobs(scores, top, offset)
            offset += sum(map(len, more["tokens"]))
            more["top_logprobs"] = [msgspec.Raw(to_json(entry)) for entry in more["top_logprobs"]]
            for name, values in more.items():
                merged[name] += values
            await turn.breathe()
        return merged

    async def _scores(self, prompt_ids: array[int], sample: Gathered) -> AsyncIterator[Sequence[Scores | None]]:
        """Up to SCORED positions at a time. The prompt's first token has no log-probability: its score is NaN, with its
        text."""
        if self._body.echo:
            first = prompt_ids[0]
            opening: Scores = [Score(first, float("nan"), 0, self._service.tokenizer.token_text(first))]
            for place, packed in enumerate(sample.prompt_logprobs or []):
                scores = prompt_scores(packed, self._service.tokenizer)
                yield scores if place else [opening, *scores[1:]]
        if not self._silent:
            for begin in range(0, len(sample.logprobs), SCORED):
                yield sample.logprobs[begin : begin + SCORED]


def _choice(index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}


def legacy_logprobs(scores: Sequence[Scores | None], top: int, offset: int) -> dict[str, Any]:
    """The completions API's log-probabilities: parallel lists over positions. offset: characters before the first."""
    found: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry in scores:
        assert entry is not None
        own = entry[0]
        unscored = own.logprob != own.logprob
        found["text_offset"].append(offset)
        found["tokens"].append(own.text or "")
        found["token_logprobs"].append(None if unscored else finite(own.logprob))
        # The token itself is listed even if it is not among the most likely, as in OpenAI's API.
        found["top_logprobs"].append(None if unscored else _by_text([*top_scores(entry, top), own]))
        offset += len(own.text or "")
    return found


def _by_text(entries: Scores) -> dict[str, float]:
    """Text -> log-probability. Of tokens with the same text, such as parts of characters, the first counts."""
    found: dict[str, float] = {}
    for one in entries:
        found.setdefault(one.text or "", finite(one.logprob))
    return found


def finite(logprob: float) -> float:
    """JSON has no infinity: a token with probability 0 gets the number that vLLM gives it."""
    return max(logprob, -9999.0)


def _by_id(entry: Scores | None) -> dict[str, Any] | None:
    """An entry of vLLM's prompt_logprobs: token id -> log-probability, rank and text."""
    if entry is None:
        return None
    return {
        str(one.token): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.text} for one in entry
    }
