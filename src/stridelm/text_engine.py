"""Text on top of an engine that works on token ids.

On the way in, forbidden words become token ids. On the way out, tokens become text as soon as it is final, and a stop
string ends its request at the token that completes it. Further tokens of that step are dropped, so that the output is
that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams
from stridelm.sample.logprobs import PromptLogprobs
from stridelm.text.output import OutputText, bad_word_ids
from stridelm.text.tokenizer import Tokenizer
from stridelm.types import Request, StepOutput


class TextEngine:
    """Not thread-safe. Requests added here must be stepped through here, not through the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._tokenizer = engine.loaded.tokenizer
        self._texts: dict[str, OutputText] = {}
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
            self._words = params, [] if self._tokenizer is None else bad_word_ids(self._tokenizer, params)
        request = self.engine.add(
            id, prompt_ids, params, sample_index=sample_index, tenant=tenant, bad_words=self._words[1], seed=seed
        )
        try:
            if self._tokenizer is not None:
                self._texts[id] = OutputText(self._tokenizer, request.prompt_ids, params)
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

    def _read(self, output: StepOutput, text: OutputText) -> None:
        """Fill in the text, and end the request where it meets a stop string."""
        output.pieces = text.read(output.new_token_ids, output.finished, output.silent)
        if text.stop is not None:
            self._cut(output, len(output.pieces), text.tokens, text.stop)

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


def name_tokens(output: StepOutput, tokenizer: Tokenizer) -> None:
    """Add the text of the tokens to the output's log-probabilities."""
    for entry in output.logprobs or ():
        for token, logprob in entry.items():
            logprob.decoded_token = tokenizer.token_text(token)
    if isinstance(output.prompt_logprobs, PromptLogprobs):
        output.prompt_logprobs.text_of = tokenizer.token_text
