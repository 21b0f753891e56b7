"""The end of a step: appends tokens to their requests, ends requests where they should, and counts metrics.

A step may emit several tokens for a request. They are read one by one, so that a stop token or a length limit cuts
exactly where plain decoding would have stopped, and any tokens drawn after it are dropped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from stridelm.engine.introspect import OfTokens
from stridelm.engine.outcome import Outcome
from stridelm.engine.roster import Roster
from stridelm.engine.stats import count_acceptance
from stridelm.types import Request, Span, StepOutput

NOTHING = OfTokens()


@dataclass(frozen=True, slots=True)
class _End:
    """Why an output ends with a token."""

    reason: str
    stop_reason: int | str | None = None
    silent: bool = False
    """The token is not part of the text."""


class Emitter:
    def __init__(self, roster: Roster, eos_id: int | None, max_length: int) -> None:
        """eos_id: the tokenizer's own end-of-text id. max_length: of a context."""
        self._roster = roster
        self._eos_id = eos_id
        self._max_length = max_length

    def emit(
        self, spans: tuple[Span, ...], rows: int, outcome: Outcome, alive: list[bool], extras: dict[int, OfTokens]
    ) -> None:
        """Turn a step's outcome into the engine's outputs; requests that finish, or whose tokens cannot be read, leave
        the engine here.

        rows: of the step. alive: whether each span's request still holds the lease with which the step was launched.
        extras: span -> what else was read from its rows.
        """
        now = time.perf_counter()
        roster, stats = self._roster, self._roster.stats
        stats.steps += 1
        stats.rows += rows
        results = zip(spans, alive, outcome.tokens, outcome.accepted, outcome.reached, outcome.drafted, strict=True)
        for i, (span, here, tokens, accepted, reached, drafted) in enumerate(results):
            if not here:
                continue
            request = span.request
            if drafted or reached:
                count_acceptance(request, accepted, reached, drafted, outcome.sources[i])
                stats.drafted += drafted
                stats.accepted += accepted
            if not tokens:
                continue
            had = len(request.output_ids)
            try:
                output = self._emit_span(request, tokens, accepted, extras.get(i, NOTHING), now)
            except Exception as error:
                del request.output_ids[had:]  # they were never emitted
                output = roster.fail(request, error)
            roster.outputs.append(output)

    def _emit_span(
        self,
        request: Request,
        tokens: list[int],
        accepted: int,
        extras: OfTokens,
        now: float,
    ) -> StepOutput:
        first = not request.output_ids
        taken, end = 0, None
        while taken < len(tokens) and end is None:
            request.output_ids.append(tokens[taken])
            end = self._end_at(request, tokens[taken])
            taken += 1
        stats = request.stats
        stats.steps += 1
        stats.first_token_s = stats.first_token_s or now
        self._roster.stats.emitted += taken
        output = StepOutput(
            request,
            tokens[:taken],
            logprobs=extras.logprobs(taken),
            hidden_states=None if extras.states is None else extras.states[:taken],
            accepted=min(accepted, taken - request.all_or_nothing),  # the first token of a window is not drafted
            finished=end is not None,
            silent=end is not None and end.silent,
        )
        if first:
            self._add_prompt(output)
        if end is not None:
            stats.finished_s = now
            self._roster.finish(request, end.reason, end.stop_reason)
        return output

    def _add_prompt(self, output: StepOutput) -> None:
        """Attach what was read from the prompt's rows to the first tokens."""
        params, prompt = output.request.params, self._roster.inside.prompt(output.request)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = prompt.logprobs
        if output.hidden_states is not None and prompt.states is not None:
            output.hidden_states = torch.cat((prompt.states, output.hidden_states))

    def _end_at(self, request: Request, token: int) -> _End | None:
        """Why this token, the output's last so far, ends the output; None if it does not."""
        params, count = request.params, len(request.output_ids)
        if count > params.min_tokens:
            is_own = token == self._eos_id and not params.ignore_eos
            if is_own or token in request.stop_ids or (token in self._roster.eos_ids and not params.ignore_eos):
                # The tokenizer's own end needs no stop reason.
                return _End("stop", None if is_own else token, silent=not params.include_stop_str_in_output)
        guide = self._roster.sampling.guide(request.slot)
        if guide is not None:
            guide.catch_up()
            if guide.broken is not None:  # the token drawn regardless is not shown
                return _End("abort", guide.broken, silent=True)
            if guide.ended:  # the model has no end-of-text id
                return _End("stop")
        if count == params.max_tokens or request.known >= self._max_length:
            return _End("length")
        return None
