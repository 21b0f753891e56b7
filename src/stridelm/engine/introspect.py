"""What requests get from a step's rows besides tokens: log-probabilities of the raw logits, and hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from stridelm.batch import ForwardBatch, Verdict
from stridelm.run.eager import Logits
from stridelm.sample.logprobs import HostLogprobs, PromptLogprobs, raw_logprobs
from stridelm.types import Logprob, Request, Span
from stridelm.upload import upload


@dataclass(slots=True)
class Readable:
    """What log-probabilities and hidden states are read from. Later steps overwrite it."""

    spans: tuple[Span, ...]
    tokens: torch.Tensor
    """[R, K] int64 emitted tokens."""
    drawn: torch.Tensor
    """[R, K] int64 decision row that each was drawn from."""
    logits: torch.Tensor
    """[M, V] raw logits of the decision rows."""
    decisions: torch.Tensor
    """[M] int64 which rows of the step those are."""
    states: torch.Tensor
    """[N, H] final states of all rows."""
    prompt_logits: torch.Tensor | None = None
    """[P, V] raw logits of the prompt rows that are reported."""
    prompt_rows: torch.Tensor | None = None
    """[P] int64 which rows of the step those are."""

    @classmethod
    def of(cls, batch: ForwardBatch, logits: Logits, verdict: Verdict) -> Readable:
        decided = verdict.tokens, verdict.rows, logits.decisions, batch.decisions
        return cls(batch.spans, *decided, logits.states.final, logits.prompt, batch.prompt_rows)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Readable:
        """With each of the tensors changed."""
        values: list[Any] = [getattr(self, each.name) for each in fields(self)]
        changed: list[Any] = [change(value) if isinstance(value, torch.Tensor) else value for value in values]
        return Readable(*changed)


@dataclass(slots=True)
class OfTokens:
    """Data of the tokens that a step decided for one request, dropped tokens included."""

    rows: range = range(0)
    scores: HostLogprobs | None = None
    """Log-probabilities, at `rows`, to be read once the step has landed."""
    states: torch.Tensor | None = None
    """[T, H] float32 on the CPU."""

    def logprobs(self, tokens: int) -> list[dict[int, Logprob]] | None:
        """Those of the first so many tokens."""
        return None if self.scores is None else [self.scores.row(row) for row in self.rows[:tokens]]


@dataclass(slots=True)
class OfPrompt:
    """Data of a prompt's rows so far; complete once the first output token is there."""

    logprobs: PromptLogprobs
    states: torch.Tensor | None = None
    """[P - 1, H] float32 on the CPU: all positions but the last, whose row decides the first token."""


class Introspection:
    def __init__(self) -> None:
        self._prompts: dict[str, OfPrompt] = {}

    def read(self, rows: Readable) -> dict[int, OfTokens]:
        """Span -> data of its tokens, for requests that want it. Data of prompt rows is stored until `prompt` reads
        it. To be called when the step has been launched, before another is: later steps overwrite its tensors. Only
        hidden states wait for the device."""
        self._read_prompts(rows)
        return self._read_tokens(rows)

    def prompt(self, request: Request) -> OfPrompt:
        return self._prompts.get(request.id) or _nothing_of(request)

    def forget(self, request: Request) -> None:
        self._prompts.pop(request.id, None)

    def _read_tokens(self, rows: Readable) -> dict[int, OfTokens]:
        reported: dict[int, OfTokens] = {}
        scored = _deciding(rows.spans, [s.request.params.logprobs is not None for s in rows.spans])
        if scored:
            index = upload(scored, rows.tokens.device)
            drawn, tokens = rows.drawn[index].clamp(min=0), rows.tokens[index].clamp(min=0)
            each = [rows.spans[i].request for i in scored for _ in range(drawn.shape[1])]
            counts = [request.params.logprobs or 0 for request in each]
            logits = rows.logits.index_select(0, drawn.flatten())
            found, width = self._scores(logits, tokens.flatten(), each, counts), drawn.shape[1]
            for place, i in enumerate(scored):
                reported[i] = OfTokens(range(place * width, (place + 1) * width), found)
        shown = _deciding(rows.spans, [s.request.params.return_hidden_states for s in rows.spans])
        if shown:
            drawn = rows.drawn[upload(shown, rows.drawn.device)].clamp(min=0)
            states = rows.states[rows.decisions[drawn]].float().cpu()
            for i, mine in zip(shown, states):
                reported.setdefault(i, OfTokens()).states = mine
        return reported

    def _read_prompts(self, rows: Readable) -> None:
        logits, prompt_rows = rows.prompt_logits, rows.prompt_rows
        if logits is None or prompt_rows is None or not prompt_rows.shape[0]:
            return
        places = [(span.request, at) for span in rows.spans for at in _told_positions(span)]
        scored = [n for n, (request, _) in enumerate(places) if request.params.prompt_logprobs is not None]
        if scored:
            each = [places[n][0] for n in scored]
            tokens = upload([places[n][0].prompt_ids[places[n][1] + 1] for n in scored], logits.device)
            counts = [request.params.prompt_logprobs or 0 for request in each]
            found = self._scores(logits[upload(scored, logits.device)], tokens, each, counts)
            for m, n in enumerate(scored):
                request, at = places[n]
                self._of(request).logprobs.put(at + 1, found, m)
        if any(request.params.return_hidden_states for request, _ in places):
            states = rows.states[prompt_rows].float().cpu()
            for (request, at), row in zip(places, states, strict=True):
                if request.params.return_hidden_states:
                    mine = self._of(request)
                    if mine.states is None:
                        mine.states = row.new_zeros(len(request.prompt_ids) - 1, len(row))
                    mine.states[at] = row

    def _of(self, request: Request) -> OfPrompt:
        if request.id not in self._prompts:
            self._prompts[request.id] = _nothing_of(request)
        return self._prompts[request.id]

    def _scores(
        self, logits: torch.Tensor, tokens: torch.Tensor, each: Sequence[Request], counts: Sequence[int]
    ) -> HostLogprobs:
        """For each row of [M, V] logits, the log-probabilities that its request wants."""
        chosen = [request.params.logprob_token_ids or () for request in each]
        widest = max(map(len, chosen))
        padded = np.array([[*ids, *[0] * (widest - len(ids))] for ids in chosen], dtype=np.int64)
        asked = upload(padded, logits.device)
        return HostLogprobs(raw_logprobs(logits, tokens, max(counts), asked), counts, [len(ids) for ids in chosen])


def _nothing_of(request: Request) -> OfPrompt:
    return OfPrompt(PromptLogprobs(len(request.prompt_ids)))


def _deciding(spans: tuple[Span, ...], wanted: Sequence[bool]) -> list[int]:
    return [i for i, (span, wants) in enumerate(zip(spans, wanted, strict=True)) if wants and span.decides]


def _told_positions(span: Span) -> range:
    """Prompt positions of the span's real rows that are reported: all but the prompt's last."""
    request = span.request
    if not request.params.reads_prompt:
        return range(0)
    return range(span.start, min(span.start + span.real, len(request.prompt_ids) - 1))
