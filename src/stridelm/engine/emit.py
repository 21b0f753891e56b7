"""The end of a step: tokens become text, requests end where they should, figures are counted.

A step may bring a request several tokens. They are read one by one, so that a stop token, a stop string or a length
limit cuts exactly where plain decoding would have stopped, and whatever the step drew behind it is dropped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stridelm.engine.outcome import Outcome
from stridelm.engine.stats import count_acceptance
from stridelm.run.eager import Logits
from stridelm.sample.logprobs import as_dicts, raw_logprobs
from stridelm.text.detokenize import Detokenizer
from stridelm.text.stops import StopStrings
from stridelm.types import ForwardBatch, Logprob, Request, Span, StepOutput, Verdict
from stridelm.upload import upload

if TYPE_CHECKING:
    from stridelm.engine.engine import Engine
    from stridelm.engine.step import Run

PromptLogprobs = list["dict[int, Logprob] | None"]


@dataclass(slots=True)
class _Live:
    """What emission keeps of a running request."""

    detokenizer: Detokenizer | None
    stops: StopStrings
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    prompt_logprobs: PromptLogprobs = field(default_factory=list)


class Emitter:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: dict[str, _Live] = {}

    def emit(self, spans: tuple[Span, ...], run: Run, outcome: Outcome, alive: list[bool]) -> list[StepOutput]:
        """Read a step's outcome into outputs; finished requests leave the engine here.

        alive: the spans whose requests are still the ones that were launched.
        """
        now = time.perf_counter()
        engine = self._engine
        engine.stats.steps += 1
        engine.stats.rows += run.rows
        logprobs = {}
        if run.detail is not None:
            self._score_prompts(run.detail.batch, run.detail.logits)
            logprobs = self._score_tokens(run.detail.batch, run.detail.logits, run.detail.verdict)
        outputs = []
        for i, span in enumerate(spans):
            if not alive[i]:
                continue
            request = span.request
            count_acceptance(request, outcome.accepted[i], outcome.reached[i], outcome.drafted[i])
            engine.stats.drafted += outcome.drafted[i]
            engine.stats.accepted += outcome.accepted[i]
            if outcome.tokens[i]:
                outputs.append(self._emit_span(request, outcome.tokens[i], outcome.accepted[i], logprobs.get(i), now))
        return outputs

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that ends without finishing here."""
        self._live.pop(request.id, None)

    def _emit_span(
        self,
        request: Request,
        tokens: list[int],
        accepted: int,
        logprobs: list[dict[int, Logprob]] | None,
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
            logprobs=None if logprobs is None else logprobs[:taken],
            prompt_logprobs=(live.prompt_logprobs or [None])
            if first and request.params.prompt_logprobs is not None
            else None,
            pieces=pieces,
            accepted=min(accepted, taken - request.whole),  # of a window, the first token is nobody's guess
            finished=finish is not None,
        )
        if finish:
            stats.finished_s = now
            engine.finish(request, *finish)
            self.forget(request)
        return output

    def _end_at(
        self, request: Request, live: _Live, token: int, text: list[str]
    ) -> tuple[str, int | str | None] | None:
        """(finish reason, stop reason) if this token is the request's last. Appends the text it makes final."""
        params, count = request.params, len(request.output_ids)
        armed = count >= params.min_tokens
        if armed and not params.ignore_eos and token in live.eos_ids:
            return self._close(live, text, None, "stop", None)
        if armed and token in live.stop_ids:
            shown = token if params.include_stop_str_in_output else None
            return self._close(live, text, shown, "stop", token)
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
        if count == params.max_tokens or request.known >= self._engine.parts.target.max_length:
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
            detokenizer = None
            if engine.tokenizer is not None:
                detokenizer = Detokenizer(engine.tokenizer, request.prompt_ids, params.skip_special_tokens)
            self._live[request.id] = _Live(
                detokenizer,
                StopStrings(params.stops, params.include_stop_str_in_output),
                frozenset(params.stop_token_ids or ()),
                frozenset(engine.parts.eos_ids),
            )
        return self._live[request.id]

    def _score_tokens(
        self, batch: ForwardBatch, logits: Logits, verdict: Verdict
    ) -> dict[int, list[dict[int, Logprob]]]:
        """Span -> log-probabilities of its emitted tokens, for the requests that want them."""
        wanted = [i for i, span in enumerate(batch.spans) if span.decides and span.request.params.logprobs is not None]
        if not wanted:
            return {}
        index = upload(wanted, verdict.tokens.device)
        rows, tokens = verdict.rows[index].clamp(min=0), verdict.tokens[index].clamp(min=0)
        widest = max(batch.spans[i].request.params.logprobs or 0 for i in wanted)
        scores = raw_logprobs(logits.decisions.index_select(0, rows.flatten()), tokens.flatten(), widest)
        columns = rows.shape[1]
        counts = [batch.spans[i].request.params.logprobs or 0 for i in wanted for _ in range(columns)]
        entries = self._with_text(as_dicts(scores, counts))
        return {i: entries[n * columns : (n + 1) * columns] for n, i in enumerate(wanted)}

    def _score_prompts(self, batch: ForwardBatch, logits: Logits) -> None:
        """Fill in the log-probabilities of prompt tokens that this step's rows score."""
        if logits.prompt is None or batch.prompt_rows is None or not batch.prompt_rows.shape[0]:
            return
        targets: list[tuple[Request, int]] = []
        for span in batch.spans:
            targets += _scored_positions(span)
        tokens = upload([r.prompt_ids[at] for r, at in targets], logits.prompt.device)
        counts = [r.params.prompt_logprobs or 0 for r, _ in targets]
        entries = self._with_text(as_dicts(raw_logprobs(logits.prompt, tokens, max(counts)), counts))
        for (request, at), entry in zip(targets, entries, strict=True):
            scored = self._state(request).prompt_logprobs
            scored.extend([None] * (len(request.prompt_ids) - len(scored)))
            scored[at] = entry

    def _with_text(self, entries: list[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        tokenizer = self._engine.tokenizer
        if tokenizer is not None:
            for entry in entries:
                for token, logprob in entry.items():
                    logprob.decoded_token = tokenizer.token_text(token)
        return entries


def _scored_positions(span: Span) -> list[tuple[Request, int]]:
    """Prompt positions whose tokens the span's real rows score."""
    request = span.request
    if request.params.prompt_logprobs is None:
        return []
    last = min(span.start + span.real, len(request.prompt_ids) - 1)
    return [(request, at + 1) for at in range(span.start, last)]
