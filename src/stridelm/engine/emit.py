"""The end of a step: tokens become text, requests end where they should, figures are counted.

A step may bring a request several tokens. They are read one by one, so that a stop token, a stop string or a length
limit cuts exactly where plain decoding would have stopped, and whatever the step drew behind it is dropped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stridelm.engine.introspect import Introspection, OfTokens
from stridelm.engine.outcome import Outcome
from stridelm.engine.stats import count_acceptance
from stridelm.text.detokenize import Detokenizer
from stridelm.text.stops import StopStrings
from stridelm.types import Request, Span, StepOutput

if TYPE_CHECKING:
    from stridelm.engine.engine import Engine
    from stridelm.engine.step import Run


@dataclass(slots=True)
class _Live:
    """What emission keeps of a running request."""

    detokenizer: Detokenizer | None
    stops: StopStrings
    eos_id: int | None
    """The tokenizer's own end of text, which needs no stop reason."""
    stop_ids: frozenset[int]
    """Other ids that end it: the checkpoint's ends of text and the request's own."""


class Emitter:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: dict[str, _Live] = {}
        self._inside = Introspection(engine.tokenizer)

    def emit(self, spans: tuple[Span, ...], run: Run, outcome: Outcome, alive: list[bool]) -> None:
        """Read a step's outcome into the engine's outputs; finished requests leave the engine here, and those that
        cannot be read.

        alive: the spans whose requests are still the ones that were launched.
        """
        now = time.perf_counter()
        engine = self._engine
        engine.stats.steps += 1
        engine.stats.rows += run.rows
        told = {} if run.detail is None else self._inside.read(run.detail)
        for i, span in enumerate(spans):
            if not alive[i]:
                continue
            request = span.request
            count_acceptance(request, outcome.accepted[i], outcome.reached[i], outcome.drafted[i])
            engine.stats.drafted += outcome.drafted[i]
            engine.stats.accepted += outcome.accepted[i]
            if not outcome.tokens[i]:
                continue
            had = len(request.output_ids)
            try:
                output = self._emit_span(request, outcome.tokens[i], outcome.accepted[i], told.get(i, OfTokens()), now)
            except Exception as error:
                del request.output_ids[had:]  # nobody was told of them
                engine.fail(request, error)
            else:
                engine.outputs.append(output)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that ends."""
        self._live.pop(request.id, None)
        self._inside.forget(request)

    def _emit_span(
        self,
        request: Request,
        tokens: list[int],
        accepted: int,
        told: OfTokens,
        now: float,
    ) -> StepOutput:
        engine, live = self._engine, self._state(request)
        first = not request.output_ids
        pieces: list[str] = []
        taken, finish = 0, None
        for token in tokens:
            request.output_ids.append(token)
            taken += 1
            text: list[str] = []
            finish = self._end_at(request, live, token, text)
            pieces.append("".join(text))
            if finish:
                break
        stats = request.stats
        stats.steps += 1
        stats.first_token_s = stats.first_token_s or now
        engine.stats.emitted += taken
        output = StepOutput(
            request,
            tokens[:taken],
            logprobs=None if told.logprobs is None else told.logprobs[:taken],
            hidden_states=None if told.states is None else told.states[:taken],
            pieces=pieces,
            accepted=min(accepted, taken - request.all_or_nothing),  # of a window, the first token is nobody's guess
            finished=finish is not None,
        )
        if first:
            self._add_prompt(output)
        if finish:
            stats.finished_s = now
            engine.finish(request, *finish)
        return output

    def _add_prompt(self, output: StepOutput) -> None:
        """What was told of the prompt's rows goes with the first tokens."""
        params, prompt = output.request.params, self._inside.prompt(output.request)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = prompt.logprobs
        if output.hidden_states is not None and prompt.states is not None:
            output.hidden_states = torch.cat((prompt.states, output.hidden_states))

    def _end_at(
        self, request: Request, live: _Live, token: int, text: list[str]
    ) -> tuple[str, int | str | None] | None:
        """(finish reason, stop reason) if this token is the request's last. Appends the text it makes final."""
        params, count = request.params, len(request.output_ids)
        armed = count > params.min_tokens
        if armed and (token == live.eos_id or token in live.stop_ids):
            shown = token if params.include_stop_str_in_output else None
            return self._close(live, text, shown, "stop", None if token == live.eos_id else token)
        guide = self._engine.sampling.guide(request.slot)
        if guide is not None:
            guide.catch_up()
            if guide.broken is not None:  # what was drawn all the same is not shown
                return self._close(live, text, None, "abort", guide.broken)
        if live.detokenizer is not None:
            safe, stop = live.stops.push(live.detokenizer.push([token]), armed)
            text.append(safe)
            if stop is not None:
                return "stop", stop
        if guide is not None and guide.ended:  # of a model without an end of text
            return self._close(live, text, None, "stop", None)
        if count == params.max_tokens or request.known >= self._engine.loaded.target.max_length:
            return self._close(live, text, None, "length", None)
        return None

    def _close(
        self, live: _Live, text: list[str], shown: int | None, reason: str, stop_reason: int | str | None
    ) -> tuple[str, int | str | None]:
        """Let go of held-back text. `shown`: a last token whose text is still to be added."""
        if live.detokenizer is None:
            return reason, stop_reason
        rest = live.detokenizer.push([shown]) if shown is not None else ""
        rest += live.detokenizer.flush()
        safe, stop = live.stops.push(rest, True)
        text.append(safe)
        if stop is not None:
            return "stop", stop
        text.append(live.stops.flush())
        return reason, stop_reason

    def _state(self, request: Request) -> _Live:
        if request.id not in self._live:
            engine, params = self._engine, request.params
            tokenizer = engine.tokenizer
            detokenizer = None
            if tokenizer is not None:
                detokenizer = Detokenizer(tokenizer, request.prompt_ids, params.skip_special_tokens)
            self._live[request.id] = _Live(
                detokenizer,
                StopStrings(params.stops, params.include_stop_str_in_output),
                None if tokenizer is None or params.ignore_eos else tokenizer.eos_id,
                frozenset(params.stop_token_ids or ()) | frozenset(() if params.ignore_eos else engine.loaded.eos_ids),
            )
        return self._live[request.id]
