"""The text of a sample, made from what the engine sends for it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from stridelm.params import SamplingParams
from stridelm.server.chunk import Chunk
from stridelm.server.errors import request_failed
from stridelm.server.messages import Delta, Finish, Score, Scores, unnamed_scores
from stridelm.text.output import OutputText
from stridelm.text.spans import Span
from stridelm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _End:
    """How a sample ended here, before the engine knew."""

    reason: str
    stop_reason: str | None = None
    error: str | None = None


@dataclass
class SampleText:
    """hidden_size: numbers in a row of hidden states. kept: special tokens that are part of the text."""

    tokenizer: Tokenizer
    prompt_ids: Sequence[int]
    params: SamplingParams
    hidden_size: int
    kept: frozenset[int] = frozenset()
    end: _End | None = None
    _output: OutputText = field(init=False)
    _unplaced: deque[Scores] = field(default_factory=deque)
    """Log-probabilities of tokens whose part of the text may still change."""

    def __post_init__(self) -> None:
        scored = self.params.logprobs is not None
        self._output = OutputText(self.tokenizer, self.prompt_ids, self.params, scored, self.kept)

    @property
    def stopped_at(self) -> tuple[int, str] | None:
        """The output's tokens and the stop string that ended it, if one has."""
        stop = self._output.stop
        return None if stop is None else (self._output.tokens, stop)

    def read(self, delta: Delta) -> Chunk:
        """The delta with its text. A stop string ends the output at the token that completes it: what the engine has
        run beyond that is dropped, and so are all later tokens."""
        if self.end is not None:
            return Chunk(finish=self._finish(delta.finish))
        chunk = Chunk.of(delta)
        chunk.put(self._output.read(delta.token_ids, delta.finish is not None, delta.silent))
        if self._output.stop is not None:
            self.end = _End("stop", self._output.stop)
            self._cut(chunk, delta.own_first)
            chunk.finish = self._finish(delta.finish)
        if chunk.logprobs is not None:
            self._unplaced += chunk.logprobs
            chunk.logprobs = [self._placed(span) for span in self._output.take_spans()]
        return chunk

    def _placed(self, span: Span) -> Scores:
        """The next log-probabilities, with names, and with the span of the token that the text has."""
        entry = self._unplaced.popleft()
        _name(entry, self.tokenizer)
        entry[0].span = span
        return entry

    def fail(self, error: Exception) -> str:
        """End it because of an error of its own. Returns what is said about it."""
        why = _what_failed(error)
        self.end = _End("error", error=why)
        return why

    def _cut(self, chunk: Chunk, own_first: bool) -> None:
        """Drop what came after the token that completed the stop string."""
        count = len(chunk.pieces)
        dropped = len(chunk.token_ids) - count
        if not dropped:
            return
        del chunk.token_ids[count:]
        if chunk.logprobs is not None:
            del chunk.logprobs[count:]
        if chunk.hidden_states:
            [states] = chunk.hidden_states
            chunk.hidden_states = [states[: -4 * self.hidden_size * dropped]]
        [(_, accepted)] = chunk.steps
        chunk.steps = [(count, min(accepted, count - own_first))]

    def _finish(self, finish: Finish | None) -> Finish | None:
        """The engine's word, with what ended the sample here in its place."""
        end = self.end
        if finish is None or end is None:
            return finish
        return msgspec.structs.replace(finish, reason=end.reason, stop_reason=end.stop_reason, error=end.error)


def prompt_scores(packed: bytes, tokenizer: Tokenizer) -> list[Scores | None]:
    """Up to SCORED positions of a prompt, with their tokens' text. Raises ApiError if a token's text cannot be made."""
    scores = unnamed_scores(packed)
    try:
        for entry in scores:
            _name(entry or (), tokenizer)
    except Exception as error:
        logger.error("the tokens of a prompt could not be named", exc_info=error)
        raise request_failed(_what_failed(error)) from error
    return scores


def _name(entry: Sequence[Score], tokenizer: Tokenizer) -> None:
    for score in entry:
        score.text = tokenizer.token_text(score.token)


def _what_failed(error: Exception) -> str:
    return f"{type(error).__name__} inside the engine"
