"""What a caller may ask of one request: sampling under vLLM's names, and how it is to be speculated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

MAX_LOGPROBS = 64
"""Most alternatives reported a position."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request is drafted and accepted. None means "as the engine was configured".

    depth: drafted rows in a chain; mask-token decoding with k tokens a step has depth k - 1.
    confidence: with `acceptance="trust"`, emit only the leading tokens whose max softmax is at least this.
    prompt_lookup_min, prompt_lookup_max: shortest and longest suffix that n-gram lookup matches, in tokens.
    """

    drafter: str | None = None
    depth: int | None = None
    acceptance: str | None = None
    confidence: float | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    @classmethod
    def of(cls, value: Speculation | Mapping[str, Any] | str | None) -> Speculation:
        """Accept a mapping, a drafter's name, or "off". Raises ValueError on unknown keys."""
        if value is None:
            return cls()
        if isinstance(value, Speculation):
            return value
        if isinstance(value, str):
            return cls(drafter="none" if value == "off" else value)
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise ValueError(f"unknown speculation option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**value)

    def over(self, base: Speculation) -> Speculation:
        """This speculation, with `base` filling what it leaves open.

        A request that names another drafter than `base` does not inherit that drafter's settings.
        """
        if self.drafter is not None and self.drafter != base.drafter:
            return self
        ours = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(base, **ours)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. Names, defaults and meaning are vLLM's; log-probabilities are of the raw logits.

    Raises ValueError, on construction, for values outside their range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    speculation: Speculation | Mapping[str, Any] | str | None = field(default=None)

    def __post_init__(self) -> None:
        _range("n", self.n, 1, 1024, whole=True)
        _range("temperature", self.temperature, 0.0, 100.0)
        _range("top_k", self.top_k, -1, 2**31 - 1, whole=True)
        _range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _range("min_tokens", self.min_tokens, 0, 2**31 - 1, whole=True)
        if self.max_tokens is not None:
            _range("max_tokens", self.max_tokens, 1, 2**31 - 1, whole=True)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}; lower it or raise max_tokens"
                )
        if self.seed is not None:
            _range("seed", self.seed, -(2**63), 2**63 - 1, whole=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _range(name, getattr(self, name), 0, MAX_LOGPROBS, whole=True)
        for token, bias in (self.logit_bias or {}).items():
            _range(f"logit_bias[{token}]", bias, -100.0, 100.0)
        for name in ("stop", "bad_words"):
            if any(not word for word in _strings(getattr(self, name), name)):
                raise ValueError(f"{name} holds an empty string, which would match everywhere; remove it")
        for words in self.bad_words_token_ids or ():
            if not words:
                raise ValueError("bad_words_token_ids holds an empty sequence; remove it")
        object.__setattr__(self, "speculation", Speculation.of(self.speculation))

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        return _strings(self.stop, "stop")

    @property
    def uses_history(self) -> bool:
        """Whether the distribution at a row depends on which tokens came before, beyond the model itself."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.bad_words)
            or bool(self.bad_words_token_ids)
        )


def _strings(value: str | Sequence[str] | None, name: str) -> tuple[str, ...]:
    values = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if any(not isinstance(word, str) for word in values):
        raise ValueError(f"{name} takes a string or a list of strings; got {value!r}")
    return values


def _range(
    name: str, value: float, low: float, high: float, *, whole: bool = False, open_low: bool = False
) -> None:
    """Raise ValueError unless `value` is a finite number in [low, high] (or (low, high])."""
    kind = int if whole else (int, float)
    bad = isinstance(value, bool) or not isinstance(value, kind) or (not whole and math.isnan(value))
    if bad or not low <= value <= high or (open_low and value == low):
        edge = "above" if open_low else "from"
        raise ValueError(f"{name} must be {'an integer' if whole else 'a number'} {edge} {low} to {high}; got {value!r}")
