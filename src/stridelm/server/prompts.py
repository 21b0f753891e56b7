"""Prompts become packed token ids, or an error, before anything is made of them.

Whatever is too long for the context is refused here, once a prompt and not once a sample, and text before it is
tokenised: that takes seconds and hundreds of bytes for each byte of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stridelm.server.errors import bad_request
from stridelm.server.messages import packed
from stridelm.text.tokenizer import Tokenizer

Asked = str | Sequence[int]
"""A prompt as requests have it: text or token ids."""


@dataclass(frozen=True)
class PromptReader:
    """context: most tokens of prompt and output. token_bytes: most bytes of text that one token can stand for
    (longest.py); None where nobody can say."""

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
        """The ids of each. Raises ApiError for one that cannot be served, all lengths being looked at first.

        special: with the tokens that the tokenizer puts around a text. param: the field that errors name. going_on:
        asked before each text is tokenised; false is as good as an error.
        """
        for prompt in prompts:
            self.check(prompt, param)
        found = []
        for prompt in prompts:
            if not going_on():
                raise bad_request("the client left", param)
            found.append(self._ids(prompt, special, param))
        return found

    def without_limit(self) -> PromptReader:
        """The same for texts that are measured and no more."""
        return replace(self, context=2**31 - 1, token_bytes=None)

    def check(self, prompt: Asked, param: str) -> None:
        """Raises ApiError for what is too long whatever its tokens turn out to be."""
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
                f"the prompt: token ids must be from 0 to {self.vocab_size - 1}, the model's vocabulary; got "
                f"{wrong[:4]}",
                param,
            )
        return packed(prompt)

    def _check_length(self, tokens: int, about: str, param: str) -> None:
        if tokens >= self.context:
            raise bad_request(
                f"the prompt has {about}{tokens} tokens and the context {self.context}, prompt and output; shorten the "
                "prompt or raise max_model_len",
                param,
            )
