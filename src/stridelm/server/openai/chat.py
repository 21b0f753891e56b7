"""POST /v1/chat/completions."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.params import SamplingParams
from stridelm.server.engine_client import Generation, Prompt
from stridelm.server.errors import ApiError, bad_request
from stridelm.server.gather import Gathered, speculation_of
from stridelm.server.large import LargeBodies
from stridelm.server.messages import SCORED, Delta, Score, Scores, top_scores
from stridelm.server.openai.completions import finite
from stridelm.server.openai.conversation import conversation_ids
from stridelm.server.openai.schemas import ChatRequest
from stridelm.server.openai.shared import Heading, Usage, check_model, reply, usage_of, wants_usage
from stridelm.server.replies import DONE, event, to_json, while_connected
from stridelm.server.service import Service
from stridelm.server.turns import Turn, in_turns

router = APIRouter(route_class=LargeBodies)


@router.post("/v1/chat/completions", response_model=None)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, through the model's chat template."""
    service: Service = request.app.state.service
    check_model(service, body.model)
    params = _params(body, service)
    with service.entering(params.n):
        prompt = await while_connected(request, conversation_ids(body, request))
    return await reply(request, [Prompt(prompt, params)], _Answer(service, body, prompt, params), bool(body.stream))


def _params(body: ChatRequest, service: Service) -> SamplingParams:
    """Raises ApiError for parameters that cannot be served."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs would have no effect without logprobs; set logprobs too", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request("max_tokens is the old name of max_completion_tokens; give only one", "max_tokens")
    if body.prompt_logprobs is not None:
        raise bad_request("chat answers have no prompt_logprobs; use /v1/completions", "prompt_logprobs")
    more: dict[str, Any] = {"max_tokens": body.max_completion_tokens or body.max_tokens}
    if body.max_tokens == 0:
        raise bad_request("max_tokens must be at least 1; raise it", "max_tokens")
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    return body.sampling(service.defaults, **more)


class _Answer:
    def __init__(self, service: Service, body: ChatRequest, prompt: array[int], params: SamplingParams) -> None:
        self._service = service
        self._body = body
        self._prompt = prompt
        self._n = params.n

    def whole(self, samples: Sequence[Gathered]) -> dict[str, Any]:
        """The answer to a request that is not streamed, without its choices."""
        heading = Heading.new(self._service, "chatcmpl", "chat.completion", self._body)
        usage = usage_of([self._prompt], samples, self._n)
        return heading.around(choices=[], usage=usage.as_json())

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as a stream of events. If it fails, the error is the last event."""
        heading = Heading.new(self._service, "chatcmpl", "chat.completion.chunk", self._body)
        usage = Usage(len(self._prompt))
        last, always = wants_usage(self._body)
        try:
            for index in range(self._n):
                opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield event(heading.around(choices=[opening]))
            while arrived := await generation.next():
                yield await in_turns(
                    self._service.turns, arrived, lambda one: self._event(*one, heading, usage, always)
                )
            if last:
                yield event(heading.around(choices=[], usage=usage.as_json()))
        except ApiError as error:
            yield event(error.body)
        yield DONE

    def _event(self, index: int, delta: Delta, heading: Heading, usage: Usage, always: bool) -> bytes:
        usage.completion += len(delta.token_ids)
        if delta.finish is not None and index == 0:
            usage.cached = delta.finish.metrics.cached_tokens
        more = {"usage": usage.as_json()} if always else {}
        return event(heading.around(choices=[self._chunk(index, delta)], **more))

    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": {"content": delta.text}, "finish_reason": None}
        choice["logprobs"] = self._logprobs(delta.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.finish is not None:
            choice["finish_reason"], choice["stop_reason"] = delta.finish.reason, delta.finish.stop_reason
            choice["speculation"] = speculation_of(delta.finish.metrics)
        return choice

    async def choice(self, index: int, sample: Gathered, turn: Turn) -> dict[str, Any]:
        """The choice of one sample."""
        content = list[msgspec.Raw]()
        for begin in range(0, len(sample.logprobs), SCORED):
            part = self._logprobs(sample.logprobs[begin : begin + SCORED])
            content += [msgspec.Raw(to_json(entry)) for entry in (part or {"content": []})["content"]]
            await turn.breathe()
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": sample.text},
            "logprobs": {"content": content} if self._body.logprobs else None,
            "finish_reason": sample.ended.reason,
            "stop_reason": sample.ended.stop_reason,
            "speculation": speculation_of(sample.ended.metrics),
        }
        if self._body.return_token_ids:
            choice["token_ids"], choice["prompt_token_ids"] = sample.token_ids, self._prompt.tolist()
        return choice

    def _logprobs(self, scores: Sequence[Scores] | None) -> dict[str, Any] | None:
        """The chat API's log-probabilities: an entry per position."""
        if not self._body.logprobs or scores is None:
            return None
        top = self._body.top_logprobs or 0
        return {
            "content": [
                {**_entry(entry[0]), "top_logprobs": [_entry(one) for one in top_scores(entry, top)]}
                for entry in scores
            ]
        }


def _entry(score: Score) -> dict[str, Any]:
    text = score.text or ""
    return {"token": text, "logprob": finite(score.logprob), "bytes": list(text.encode())}
