"""Turns an output's tokens into text, and finds the stop string that ends it. Needs no engine: whoever receives the
tokens may do it, in whichever process (docs/decisions/0016-text-stands-on-top.md)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stridelm.params import SamplingParams
from stridelm.text.detokenize import Detokenizer
from stridelm.text.spans import PlacedToken, Span, TokenPlacer
from stridelm.text.stops import StopStrings
from stridelm.text.tokenizer import Tokenizer
from stridelm.values import shortened


class OutputText:
    """The text of one output, released as soon as it is final. places: also find each token's part of it. kept: special
    tokens that are part of it in any case."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        places: bool = False,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self.tokens = 0
        """Output tokens read so far."""
        self.stop: str | None = None
        """The stop string that ended the output."""
        self._min_tokens = params.min_tokens
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens, kept)
        self._stops = StopStrings(params.stops, params.include_stop_str_in_output)
        self._placer = TokenPlacer(tokenizer, prompt_ids, params.skip_special_tokens, kept) if places else None
        self._placed = deque[PlacedToken]()
        """Tokens whose spans have not been taken."""
        self._has_stops = bool(params.stops)
        self._ended = False
        self._length = 0
        """Characters of the pieces returned so far."""

    def read(self, token_ids: Sequence[int], last: bool = False, silent: bool = False) -> list[str]:
        """For each token, the text that it made final. Where a stop string is completed, `stop` is set, that token's
        text is the last of the list, and nothing more may be read.

        last: these tokens end the output, so nothing is held back. silent: the very last one is not part of the text.
        """
        assert self.stop is None, "tokens were read after a stop string"
        pieces: list[str] = []
        for count, token in enumerate(token_ids, start=1):
            ends = last and count == len(token_ids)
            piece, stop = "", None
            if self._placer is not None:
                self._placed.append(self._placer.place(token, ends and silent))
            if not (ends and silent):
                armed = self.tokens + count > self._min_tokens
                piece, stop = self._stops.push(self._detokenizer.push((token,)), armed)
            if ends and stop is None:  # release the text held back
                rest, stop = self._stops.push(self._detokenizer.flush(), True)
                piece += rest + ("" if stop is not None else self._stops.flush())
            pieces.append(piece)
            if stop is not None:
                self.stop = stop
                break
        self.tokens += len(pieces)
        self._length += sum(map(len, pieces))
        self._ended = last or self.stop is not None
        return pieces

    def take_spans(self) -> list[Span]:
        """The spans of the tokens read since the last call. A token of which a stop string may still take a part waits,
        so that a stream says the same of it as a whole answer."""
        if not self._has_stops:
            spans = [token.span for token in self._placed]
            self._placed.clear()
            return spans
        spans = []
        while self._placed and (self._ended or self._placed[0].end <= self._length):
            spans.append(self._placed.popleft().cut(self._length))
        return spans


def bad_word_ids(tokenizer: Tokenizer, params: SamplingParams) -> list[list[int]]:
    """Token sequences of the parameters' forbidden words: each word without and with a leading space.

    Raises ValueError for a word that has no tokens.
    """
    sequences: list[list[int]] = []
    for word in params.bad_words or ():
        bare, spaced = (tokenizer.encode(form, False) for form in (word.lstrip(), " " + word.lstrip()))
        if not bare:
            raise ValueError(f"bad_words: {shortened(word)} has no tokens; leave it out")
        sequences += [bare, spaced] if spaced != bare else [bare]
    return sequences
