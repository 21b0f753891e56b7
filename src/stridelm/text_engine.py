"""Text on top of an engine that works on token ids.

On the way in, forbidden words become token ids. On the way out, tokens become text as soon as it is final, and a stop
string ends its request at the token that completes it. Further tokens of that step are dropped, so that the output is
that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams
from stridelm.sample.logprobs import PromptLogprobs
from stridelm.text.detokenize import Detokenizer
from stridelm.text.stops import StopStrings
from stridelm.text.tokenizer import Tokenizer
from stridelm.types import Request, StepOutput
from stridelm.values import shortened


@dataclass(slots=True)
class _Text:
    """Text state of a running request."""

    detokenizer: Detokenizer
    stops: StopStrings
    tokens: int = 0
    """Output tokens read so far."""


class TextEngine:
    """Not thread-safe. Requests added here must be stepped through here, not through the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._tokenizer = engine.loaded.tokenizer
        self._texts: dict[str, _Text] = {}
        """By request id."""
        self._words: tuple[SamplingParams, list[list[int]]] | None = None
        """The last parameters and their forbidden words as token ids: the samples of a prompt share them."""

    def add(
        self,
        id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        sample_index: int = 0,
        tenant: str = "",
        seed: int | None = None,
    ) -> Request:
        """Queue a request, as Engine.add does. Raises ValueError, with nothing changed, if it can never be served."""
        if self._tokenizer is None and (params.stops or params.bad_words):
            raise ValueError(
                "stop and bad_words need a tokenizer, and the engine was started with skip_tokenizer_init; "
                "use stop_token_ids and bad_words_token_ids"
            )
        if self._words is None or self._words[0] is not params:
            self._words = params, self.bad_words(params)
        request = self.engine.add(
            id, prompt_ids, params, sample_index=sample_index, tenant=tenant, bad_words=self._words[1], seed=seed
        )
        try:
            if self._tokenizer is not None:
                detokenizer = Detokenizer(self._tokenizer, request.prompt_ids, params.skip_special_tokens)
                stops = StopStrings(params.stops, params.include_stop_str_in_output)
                self._texts[id] = _Text(detokenizer, stops)
        except BaseException:
            self.engine.abort(id)
            raise
        return request

    def abort(self, id: str) -> bool:
        """Drop a waiting or running request; False if there is none with this id."""
        self._texts.pop(id, None)
        return self.engine.abort(id)

    def step(self) -> list[StepOutput]:
        """Run one step and return each request's output, with its text. Raises what Engine.step raises."""
        if self._tokenizer is None:
            return self.engine.step()
        outputs = []
        for output in self.engine.step():
            request = output.request
            text = self._texts.get(request.id)
            if text is None:  # ended by a stop string in this very step
                continue
            try:
                self._read(output, text)
                name_tokens(output, self._tokenizer)
            except Exception as error:
                del request.output_ids[text.tokens :]  # they were never emitted
                output = self.engine.fail(request, error)
            if output.finished:
                del self._texts[request.id]
            outputs.append(output)
        return outputs

    def _read(self, output: StepOutput, text: _Text) -> None:
        """Fill in the text, and end the request where it meets a stop string."""
        params, pieces = output.request.params, output.pieces
        for count, token in enumerate(output.new_token_ids, start=1):
            last = output.finished and count == len(output.new_token_ids)
            piece, stop = "", None
            if not (last and output.silent):
                armed = text.tokens + count > params.min_tokens
                piece, stop = text.stops.push(text.detokenizer.push([token]), armed)
            if last and stop is None:  # release the text held back
                rest, stop = text.stops.push(text.detokenizer.flush(), True)
                piece += rest + ("" if stop is not None else text.stops.flush())
            pieces.append(piece)
            if stop is not None:
                self._cut(output, count, text.tokens + count, stop)
                return
        text.tokens += len(output.new_token_ids)

    def _cut(self, output: StepOutput, count: int, length: int, stop: str) -> None:
        """End the output after `count` of its new tokens, which leaves the request `length` output tokens in all."""
        dropped = len(output.new_token_ids) - count
        self.engine.cut(output.request, length, stop)
        del output.new_token_ids[count:]
        if output.logprobs is not None:
            del output.logprobs[count:]
        if output.hidden_states is not None and dropped:
            output.hidden_states = output.hidden_states[:-dropped]
        output.accepted = min(output.accepted, count - output.request.all_or_nothing)
        output.finished = True

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences of the forbidden words: each word without and with a leading space.

        Raises ValueError for a word that has no tokens.
        """
        sequences: list[list[int]] = []
        for word in params.bad_words or ():
            assert self._tokenizer is not None
            bare, spaced = (self._tokenizer.encode(form, False) for form in (word.lstrip(), " " + word.lstrip()))
            if not bare:
                raise ValueError(f"bad_words: {shortened(word)} has no tokens; leave it out")
            sequences += [bare, spaced] if spaced != bare else [bare]
        return sequences


def name_tokens(output: StepOutput, tokenizer: Tokenizer) -> None:
    """Add the text of the tokens to the output's log-probabilities."""
    for entry in output.logprobs or ():
        for token, logprob in entry.items():
            logprob.decoded_token = tokenizer.token_text(token)
    if isinstance(output.prompt_logprobs, PromptLogprobs):
        output.prompt_logprobs.text_of = tokenizer.token_text
