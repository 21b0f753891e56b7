"""A sample's answer, in SGLang's format."""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from stridelm.engine.request_metrics import RequestMetrics
from stridelm.params import SamplingParams
from stridelm.server.chunk import Chunk
from stridelm.server.gather import Gathered
from stridelm.server.messages import Finish, Score, Scores, top_scores
from stridelm.server.openai.completions import finite
from stridelm.server.replies import to_json
from stridelm.server.sample_text import prompt_scores
from stridelm.text.tokenizer import Tokenizer

WEIGHTS = "default"
"""SGLang's version of weights that were never updated."""
ABORTED = "the request was aborted"

Triple = list[Any]
"""Log-probability, token id, text if requested."""


@dataclass(frozen=True)
class Task:
    """One prompt, and what its answer must contain."""

    prompt_ids: array[int]
    params: SamplingParams
    scores_only: bool
    """Whether only the prompt is scored; the one token that is drawn nevertheless is left out."""
    told_from: int | None
    """First position of the prompt whose log-probability is returned. None: no log-probabilities, not even
    the output's."""
    top: int
    """Number of most likely tokens returned per position."""
    with_text: bool


@dataclass
class Mark:
    """How much of a sample has been sent: characters, token ids, scored positions of the prompt and of the output."""

    text: int = 0
    ids: int = 0
    prompt: int = 0
    scores: int = 0


class Columns:
    """Log-probabilities by position, each encoded only once, since a stream repeats them in every event."""

    def __init__(self) -> None:
        self.own: list[msgspec.Raw] = []
        self.top: list[msgspec.Raw] = []
        self.chosen: list[msgspec.Raw] = []

    def add(self, own: Triple, top: list[Triple] | None, chosen: list[Triple] | None) -> None:
        for column, value in ((self.own, own), (self.top, top), (self.chosen, chosen)):
            column.append(msgspec.Raw(to_json(value)))


class SampleResponse:
    """One sample's answer, as far as it has arrived. began: time.monotonic() of the request."""

    def __init__(self, rid: str, task: Task, began: float, tokenizer: Tokenizer, hidden_size: int) -> None:
        self._rid = rid
        self._task = task
        self._began = began
        self._tokenizer = tokenizer
        self._hidden_size = hidden_size
        self._sample = Gathered()
        self._seconds = 0.0
        self._packed: deque[bytes] = deque()
        """The prompt's log-probabilities, until they are decoded."""
        self._place = 0
        """Positions of the prompt whose log-probabilities have been decoded."""
        self._input, self._output = Columns(), Columns()

    def take(self, chunk: Chunk) -> None:
        if self._task.scores_only:
            states, prompt = chunk.hidden_states, chunk.prompt_logprobs
            chunk = Chunk(prompt_logprobs=prompt, hidden_states=states, finish=chunk.finish)
        self._sample.take(chunk)
        if chunk.finish is not None:
            self._seconds = time.monotonic() - self._began
        if self._task.told_from is None:
            return
        self._packed.extend(chunk.prompt_logprobs or ())
        for entry in chunk.logprobs or ():
            self._add(self._output, entry)

    def read_some(self) -> bool:
        """Decode some of the prompt's log-probabilities that have arrived, of which there may be very many. Returns
        whether there were any.

        The first is returned without a score: SGLang never has it, and its clients leave it out of their sums.
        """
        if not self._packed:
            return False
        first = self._task.told_from
        assert first is not None
        for entry in prompt_scores(self._packed.popleft(), self._tokenizer):
            if self._place == first:
                token = self._task.prompt_ids[first]
                text = self._tokenizer.token_text(token) if self._task.with_text else None
                self._input.add([None, token, text], None, None)
            elif self._place > first:
                assert entry is not None
                self._add(self._input, entry)
            self._place += 1
        return True

    @property
    def tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self._sample.token_ids)

    @property
    def ended(self) -> bool:
        return self._sample.finish is not None

    def answer(self, sent: Mark | None = None) -> dict[str, Any]:
        """The whole answer so far; or only what is new since `sent`, which is updated."""
        sample, task = self._sample, self._task
        since = Mark() if sent is None else replace(sent)
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": None,
            "prompt_tokens": len(task.prompt_ids),
            "weight_version": WEIGHTS,
            "completion_tokens": len(sample.token_ids),
        }
        if task.told_from is not None:
            shown, scored = self._input, self._output
            begin, first = since.scores, since.prompt
            meta |= {"input_token_logprobs": shown.own[first:], "output_token_logprobs": scored.own[begin:]}
            meta["output_token_logprobs_length"] = len(scored.own)
            if task.top:
                meta |= {"input_top_logprobs": shown.top[first:], "output_top_logprobs": scored.top[begin:]}
            if task.params.logprob_token_ids:
                meta["input_token_ids_logprobs"] = shown.chosen[first:]
                meta["output_token_ids_logprobs"] = scored.chosen[begin:]
        if sample.finish is not None:
            meta |= self._at_end(sample.finish)
        if sent is not None:
            sent.text, sent.ids = len(sample.text), len(sample.token_ids)
            sent.prompt, sent.scores = len(self._input.own), len(self._output.own)
        return {"text": sample.text[since.text :], "output_ids": sample.token_ids[since.ids :], "meta_info": meta}

    def _at_end(self, finish: Finish) -> dict[str, Any]:
        """The fields that are known only at the end."""
        ids, metrics = self._sample.token_ids, finish.metrics
        meta = {
            "finish_reason": self._finish_reason(finish),
            "cached_tokens": metrics.cached_tokens,
            "e2e_latency": self._seconds,
            "drafter": metrics.drafter,
            "acceptance": metrics.acceptance,
            "lossless": metrics.lossless,
        }
        if self._task.params.return_hidden_states:
            meta["hidden_states"] = self._states()
        return meta if self._task.scores_only or metrics.drafter == "none" else meta | _speculated(metrics, len(ids))

    def _finish_reason(self, finish: Finish) -> dict[str, Any]:
        ids = self._sample.token_ids
        if finish.reason == "abort":
            return {"type": "abort", "message": ABORTED}
        if finish.reason == "length" or self._task.scores_only:
            return {"type": "length", "length": len(ids)}
        return {"type": "stop", "matched": ids[-1] if finish.stop_reason is None else finish.stop_reason}

    def _add(self, columns: Columns, entry: Scores) -> None:
        columns.add(self._triple(entry[0]), self._top(entry), self._chosen(entry))

    def _top(self, entry: Scores) -> list[Triple] | None:
        return [self._triple(one) for one in top_scores(entry, self._task.top)] or None

    def _chosen(self, entry: Scores) -> list[Triple] | None:
        by_id = {one.token: one for one in entry}
        return [self._triple(by_id[token]) for token in self._task.params.logprob_token_ids or ()] or None

    def _states(self) -> list[Any]:
        """A list of the prompt's vectors, then the vector of each output token except the last, which was never run."""
        rows = np.frombuffer(self._sample.hidden_states, np.float32).reshape(-1, self._hidden_size).tolist()
        length = len(self._task.prompt_ids)
        return [rows[:length], *rows[length:]]

    def _triple(self, score: Score) -> Triple:
        return [finite(score.logprob), score.token, score.text if self._task.with_text else None]


def _speculated(metrics: RequestMetrics, tokens: int) -> dict[str, Any]:
    """Statistics of a sample's drafts, under SGLang's names."""
    steps, accepted_at = metrics.steps, metrics.accepted_at
    upto = [steps, *accepted_at, 0]  # entry i: steps that accepted at least i drafted tokens
    histogram = [more - fewer for more, fewer in pairwise(upto)]
    return {
        "spec_verify_ct": steps,
        "spec_accept_length": tokens / steps if steps else 0.0,
        "spec_accept_rate": metrics.accepted / metrics.drafted if metrics.drafted else 0.0,
        "spec_num_correct_drafts": metrics.accepted,
        "spec_num_proposed_drafts": metrics.drafted,
        "spec_accept_histogram": histogram,
        "spec_correct_drafts_histogram": histogram,
    }
