"""POST /v1/completions."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
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
from stridelm.server.messages import SCORED, Score, Scores, span_of, top_scores
from stridelm.server.openai.schemas import CompletionRequest
from stridelm.server.openai.shared import Choices, Heading, check_model, reply
from stridelm.server.replies import to_json, while_connected
from stridelm.server.sample_text import prompt_scores
from stridelm.server.service import Service
from stridelm.server.turns import Turn
from stridelm.text.spans import TokenPlacer
from stridelm.text.tokenizer import shown

router = APIRouter(route_class=LargeBodies)


@router.post("/v1/completions", response_model=None)
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Complete one prompt or several."""
    service: Service = request.app.state.service
    check_model(service, body.model)
    params = completion_params(body, service)
    prompts = await completion_prompts(body, request)
    asked = [Prompt(ids, params) for ids in prompts]
    return await reply(request, asked, _Answer(service, body, prompts, params), body.stream)


def completion_params(body: CompletionRequest, service: Service) -> SamplingParams:
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


async def completion_prompts(body: CompletionRequest, request: Request) -> list[array[int]]:
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


class _Answer(Choices):
    def __init__(
        self, service: Service, body: CompletionRequest, prompts: Sequence[array[int]], params: SamplingParams
    ) -> None:
        super().__init__(service, body, Heading(service, "cmpl", "text_completion", body), prompts, params.n)
        self._body = body
        self._texts: dict[int, str] = {}
        """Index of a prompt -> its text, for echo."""
        self._silent = body.max_tokens == 0
        """Whether the one token that is drawn is left out."""
        self._skip = params.skip_special_tokens

    def counted(self, chunk: Chunk) -> Chunk:
        return Chunk(finish=chunk.finish, cached_tokens=chunk.cached_tokens) if self._silent else chunk

    def opening_choices(self) -> Iterator[dict[str, Any]]:
        indices = range(len(self._prompts) * self._n if self._body.echo else 0)
        return (_choice(index, self._prompt_text(index), None) for index in indices)

    def chunk_choices(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        finish, top = chunk.finish, self._body.logprobs
        logprobs = None if top is None else legacy_logprobs(chunk.logprobs or [], top)
        choice = _choice(index, chunk.text, logprobs)
        if self._body.return_token_ids:
            choice["token_ids"], choice["token_texts"] = chunk.token_ids, chunk.pieces
            choice["accepted"], choice["steps"] = chunk.accepted, chunk.steps
        if finish is not None:
            choice["finish_reason"], choice["stop_reason"] = finish.reason, finish.stop_reason
            choice["speculation"] = speculation_of(finish.metrics)
        return [choice]

    async def choice(self, index: int, sample: Gathered, turn: Turn) -> dict[str, Any]:
        prompt_ids = self._prompts[index // self._n]
        text = "" if self._silent else sample.text
        ids = [] if self._silent else sample.token_ids
        if self._body.echo:
            text = self._prompt_text(index) + text
        wanted = self._body.logprobs
        logprobs = None if wanted is None else await self._all_logprobs(index, sample, wanted, turn)
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
            self._texts[prompt] = self._service.tokenizer.decode(self._prompts[prompt].tolist(), self._skip)
        return self._texts[prompt]

    async def _all_logprobs(self, index: int, sample: Gathered, top: int, turn: Turn) -> dict[str, Any]:
        """The sample's log-probabilities, with the prompt's if it is echoed."""
        merged = legacy_logprobs([], top)
        async for scores, offset in self._scores(index, sample):
            more = legacy_logprobs(scores, top, offset)
            more["top_logprobs"] = [msgspec.Raw(to_json(entry)) for entry in more["top_logprobs"]]
            for name, values in more.items():
                merged[name] += values
            await turn.breathe()
        return merged

    async def _scores(self, index: int, sample: Gathered) -> AsyncIterator[tuple[Sequence[Scores], int]]:
        """Up to SCORED positions at a time, and the characters before their text."""
        offset = 0
        if self._body.echo:
            offset = len(self._prompt_text(index))
            for scores in self._echoed(self._prompts[index // self._n], sample.prompt_logprobs or []):
                yield scores, 0
        if not self._silent:
            for begin in range(0, len(sample.logprobs), SCORED):
                yield sample.logprobs[begin : begin + SCORED], offset

    def _echoed(self, prompt_ids: array[int], packed: Sequence[bytes]) -> Iterator[list[Scores]]:
        """The prompt's log-probabilities. Its first token has none: the score is NaN."""
        tokenizer = self._service.tokenizer
        placer = TokenPlacer(tokenizer, (), self._skip)
        first = prompt_ids[0]
        opening: Scores = [Score(first, float("nan"), 0, tokenizer.token_text(first))]
        for part in packed:
            scores = [entry or opening for entry in prompt_scores(part, tokenizer)]
            for entry in scores:
                entry[0].span = placer.place(entry[0].token).span
            yield scores


def _choice(index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}


def legacy_logprobs(scores: Sequence[Scores], top: int, offset: int = 0) -> dict[str, Any]:
    """The completions API's log-probabilities: parallel lists over positions. offset: characters before the text in
    which the tokens have their places."""
    found: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry in scores:
        own, span = entry[0], span_of(entry)
        unscored = own.logprob != own.logprob
        found["text_offset"].append(offset + span.begin)
        found["tokens"].append(shown(span.data))
        found["token_logprobs"].append(None if unscored else finite(own.logprob))
        found["top_logprobs"].append(None if unscored else _by_text(entry, top))
    return found


def _by_text(entry: Scores, top: int) -> dict[str, float]:
    """Text -> log-probability. The position's own token is listed, under its part of the text, even if it is not among
    the most likely, as in OpenAI's API. Of tokens with the same text, the first counts."""
    own, part = entry[0], shown(span_of(entry).data)
    found: dict[str, float] = {}
    for one in (*top_scores(entry, top), own):
        found.setdefault(part if one is own else one.text or "", finite(one.logprob))
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
