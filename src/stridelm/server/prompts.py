"""Turns prompts into packed token ids, or an error, before anything else is done with them.

A prompt that is too long for the context is refused here, once and not for each of its samples, and a text before it is
tokenised, which could take seconds and hundreds of bytes of memory per byte.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stridelm.server.errors import bad_request
from stridelm.server.messages import packed
from stridelm.text.tokenizer import Tokenizer

Asked = str | Sequence[int]
"""A prompt as given in a request: text or token ids."""


@dataclass(frozen=True)
class PromptReader:
    """context: maximum tokens of prompt and output. token_bytes: maximum bytes of text that one token can represent
    (longest.py); None if unknown."""

    tokenizer: Tokenizer
    context: int
    vocab_size: int
    token_bytes: int | None

    def read(
        self,
        prompts: Sequence[Asked],
        special: bool,
        param: str,
        going_on: Callable[[], bool] = lambda: True,
    ) -> list[array[int]]:
        """The ids of each prompt. Raises ApiError for one that cannot be served; all lengths are checked first.

        special: add the tokens that the tokenizer puts around a text. param: the field that errors name. going_on:
        called before each prompt is read; if it returns false, ApiError is raised.
        """
        for prompt in prompts:
            self.check(prompt, param)
        read = []
        for prompt in prompts:
            if not going_on():
                raise bad_request("the client left", param)
            read.append(self._ids(prompt, special, param))
        return read

    def without_limit(self) -> PromptReader:
        """The same reader without a limit on length, for texts that are only tokenised."""
        return replace(self, context=2**31 - 1, token_bytes=None)

    def check(self, prompt: Asked, param: str) -> None:
        """Raises ApiError for a prompt that is certain to be too long, before it is tokenised."""
        if not isinstance(prompt, str):
            self._check_length(len(prompt), "", param)
        elif self.token_bytes is not None and len(prompt) >= self.context:
            size = len(prompt) if prompt.isascii() else len(prompt.encode(errors="replace"))
            self._check_length(-(-size // self.token_bytes), "at least ", param)

    def _ids(self, prompt: Asked, special: bool, param: str) -> array[int]:
        if isinstance(prompt, str):
            try:
                ids = self.tokenizer.encode(prompt, special)
            except ValueError as error:
                raise bad_request(str(error), param) from error
            self._check_length(len(ids), "", param)
            return packed(ids)
        wrong = [] if max(prompt) < self.vocab_size else [token for token in prompt if token >= self.vocab_size]
        if wrong:
            raise bad_request(
                f"the prompt: token ids must be within the model's vocabulary, 0 to {self.vocab_size - 1}; got "
                f"{wrong[:4]}",
                param,
            )
        return packed(prompt)

    def _check_length(self, tokens: int, qualifier: str, param: str) -> None:
        if tokens >= self.context:
            raise bad_request(
                f"the prompt has {qualifier}{tokens} tokens, but the context holds {self.context} for prompt and "
                "output; shorten the prompt or raise max_model_len",
                param,
            )
