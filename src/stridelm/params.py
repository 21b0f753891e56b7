"""The parameters of one request: sampling, under vLLM's names, and speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from stridelm.options import Given, OptionsT, is_of_rules, known, read, takes_options
from stridelm.values import (
    LARGEST,
    check_count,
    check_flag,
    check_known,
    check_plain,
    json_text,
    number,
    option,
    sequences,
    settle_number,
    shortened,
    strings,
    token_ids,
)

MAX_LOGPROBS = 64
"""Maximum number of alternatives reported per position."""
MAX_LOGPROB_TOKEN_IDS = 1024
"""Maximum number of tokens reported because they were requested by id."""
MAX_LOGIT_BIASES = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_STOPS, MAX_STOPS_LENGTH = 128, 8192
"""Number of stop strings, and of characters in all of them."""
MAX_BAD_WORDS, MAX_BAD_WORDS_LENGTH = 1024, 8192
"""Number of forbidden words, and of characters or tokens in all of them."""
MAX_SALT = 256
"""Characters of a cache_salt."""
OWN = ("drafter", "depth", "acceptance", "acceptance_length")
"""Fields of Speculation that are its own, not options of a drafter or rule."""


@takes_options
@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request is drafted and accepted. None means "as the engine was configured".

    drafter: name of the drafter, "none" or "auto".
    depth: drafted rows in a chain; mask-token decoding with k tokens per step has depth k - 1. "auto": at most the
        drafter's own, chosen at every step, as by an engine with `depth="auto"`.
    acceptance: name of the rule. A simulated one takes its length after a colon: "synthetic:2.5".
    acceptance_length: that length: tokens that a step with a full draft emits on average.
    adaptive: whether `depth`, or the drafter's own, is only the most that may be chosen; "auto" sets it.
    options: options registered by drafters and rules. Each is also a keyword argument and an attribute, as in
        `Speculation("ngram", prompt_lookup_min=2)`.

    Raises ValueError, on construction, for an invalid value, and TypeError for an unknown option.
    """

    drafter: str | None = None
    depth: int | None = None
    acceptance: str | None = None
    acceptance_length: float | None = None
    adaptive: bool = field(default=False, kw_only=True)
    options: Given = field(default=(), kw_only=True)

    if TYPE_CHECKING:

        def __init__(
            self,
            drafter: str | None = None,
            depth: int | Literal["auto"] | None = None,
            acceptance: str | None = None,
            acceptance_length: float | None = None,
            *,
            adaptive: bool = False,
            **options: Any,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("drafter", "acceptance"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a name; got {value!r}")
            check_plain(name, value)
        self._settle_depth()
        self._split_acceptance()
        settle_number(self, "acceptance_length", 1.0, LARGEST, optional=True)

    @classmethod
    def of(cls, value: Speculation | Mapping[str, Any] | str | None) -> Speculation:
        """Accept a mapping, a drafter's name, or "off". Raises ValueError for anything else."""
        if value is None:
            return cls()
        if isinstance(value, Speculation):
            return value
        if isinstance(value, str):
            return cls(drafter="none" if value == "off" else value)
        if not isinstance(value, Mapping):
            raise ValueError(f"speculation takes a mapping, a drafter's name or 'off'; got {value!r}")
        check_known(value, (*OWN, *known()), "speculation option")
        return cls(**value)

    def over(self, base: Speculation) -> Speculation:
        """This speculation, with `base` filling the fields it leaves unset.

        A request that names a different drafter inherits nothing from `base`, and one that names a different rule does
        not inherit the options of `base`'s rule.
        """
        if self.drafter is not None and self.drafter != base.drafter:
            return self
        inherited = base.given
        if self.acceptance is not None:  # the length belongs to the rule
            inherited.pop("acceptance_length", None)
        if self.acceptance not in (None, base.acceptance):
            inherited = {name: value for name, value in inherited.items() if not is_of_rules(name)}
        merged = Speculation(**{**inherited, **self.given})
        return merged if self.depth is None else replace(merged, depth=self.depth)  # which "auto" does not say

    @property
    def given(self) -> dict[str, Any]:
        """The fields and options that are set, by the names under which `of` takes them."""
        own = {name: value for name in OWN if (value := getattr(self, name)) is not None}
        return own | ({"depth": "auto"} if self.adaptive else {}) | dict(self.options)

    def read(self, options: type[OptionsT]) -> OptionsT:
        """This dataclass, filled from the options that are set, the rest at their defaults."""
        return read(options, self.options)  # type: ignore[arg-type]  # a class is hashable

    @property
    def rule(self) -> str:
        """The acceptance rule as a request spells it: `exact`, `synthetic:2.5`."""
        name = self.acceptance or "exact"
        return name if self.acceptance_length is None else f"{name}:{self.acceptance_length:g}"

    def _settle_depth(self) -> None:
        depth: Any = self.depth
        if depth == "auto":
            object.__setattr__(self, "depth", None)
            object.__setattr__(self, "adaptive", True)
        elif isinstance(depth, str):
            raise ValueError(f"depth must be an integer or auto; got {shortened(depth)}")
        settle_number(self, "depth", 0, LARGEST, whole=True, optional=True)

    def _split_acceptance(self) -> None:
        """Split "synthetic:2.5" into name and length. Called on construction."""
        name, colon, length = (self.acceptance or "").partition(":")
        if not colon:
            return
        if self.acceptance_length is not None:
            raise ValueError(f"acceptance {self.acceptance!r} already contains the length; leave acceptance_length out")
        try:
            object.__setattr__(self, "acceptance_length", float(length))
        except ValueError:
            raise ValueError(
                f"acceptance {self.acceptance!r}: a number of tokens must follow the colon, as in synthetic:2.5"
            ) from None
        object.__setattr__(self, "acceptance", name)


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Constraints on the output, under vLLM's names. Exactly one of these:

    json: a JSON schema, as text or as a mapping. json_object: any JSON object. regex: a regular expression that matches
    all of the output. choice: one of these texts. grammar: EBNF with a rule called root. structural_tag: xgrammar's, as
    JSON text or as a mapping: structure after a trigger, free text before it.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_flag("structured_outputs.json_object", self.json_object)
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs takes one of {', '.join(f.name for f in fields(self))}; got {len(given)} of them"
            )
        for name in ("json", "regex", "grammar", "structural_tag"):
            value = getattr(self, name)
            check_plain(f"structured_outputs.{name}", value)
            if isinstance(value, Mapping) and name in ("json", "structural_tag"):
                value = json_text(value)
                object.__setattr__(self, name, value)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"structured_outputs.{name} must be text; got {shortened(value)}")
        if self.choice is not None:
            object.__setattr__(self, "choice", strings("structured_outputs.choice", self.choice))
            if not self.choice:
                raise ValueError("structured_outputs.choice is empty; give at least one text")

    @classmethod
    def of(cls, value: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
        """Accept a mapping too. Raises ValueError for anything else."""
        if isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"structured_outputs takes a mapping; got {shortened(value)}")
        check_known(value, (f.name for f in fields(cls)), "structured_outputs option")
        return cls(**value)

    @property
    def kind(self) -> str:
        """Name of the constraint that is set."""
        return next(f.name for f in fields(self) if getattr(self, f.name) not in (None, False))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. Names, defaults and meaning are vLLM's; log-probabilities are of the raw logits.

    Raises ValueError, on construction, for values outside their range.
    """

    n: int = option(1, "samples of the prompt")
    temperature: float = option(1.0, "0 is greedy, 1 samples the model's own distribution")
    top_k: int = option(0, "sample among this many most likely tokens; 0 or -1 for all")
    top_p: float = option(1.0, "sample among the most likely tokens that together hold this share of the probability")
    min_p: float = option(0.0, "sample among tokens at least this fraction as likely as the most likely one")
    repetition_penalty: float = option(1.0, "above 1 makes tokens of prompt and output less likely")
    presence_penalty: float = option(0.0, "subtracted from the logit of every token already in the output")
    frequency_penalty: float = option(0.0, "the same, once for each occurrence in the output")
    logit_bias: Mapping[int, float] | None = option(None, "token id and the value added to its logit")
    bad_words: Sequence[str] | None = option(None, "text that the output may not contain")
    bad_words_token_ids: Sequence[Sequence[int]] | None = option(None, "the same as token ids")
    min_tokens: int = option(0, "the output cannot end before it has more tokens than this")
    max_tokens: int | None = option(16, "maximum tokens of output; none for as many as fit the context")
    stop: str | Sequence[str] | None = option(None, "text that ends the output and is left out of it")
    stop_token_ids: Sequence[int] | None = option(None, "token ids that end the output, in addition to the model's own")
    include_stop_str_in_output: bool = option(False, "keep the text that ended the output")
    ignore_eos: bool = option(False, "continue after an end of text")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")
    seed: int | None = option(None, "same seed, same output under acceptance exact; drawn at random if not given or -1")
    logprobs: int | None = option(None, "log-probabilities of this many most likely tokens per position of the output")
    prompt_logprobs: int | None = option(None, "the same for the prompt")
    logprob_token_ids: Sequence[int] | None = option(None, "token ids whose log-probabilities are reported in addition")
    return_hidden_states: bool = option(False, "return the final hidden state at each position")
    priority: int = option(0, "lower is served first")
    target_tps: float | None = option(
        None,
        "tokens per second that its drafts are to reach, if depth is auto: while it is slower, they count for more",
    )
    cache_salt: str | None = option(None, "share cached prefixes and learnt drafts only with requests of the same salt")
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = field(default=None)
    speculation: Speculation | Mapping[str, Any] | str | None = field(default=None)

    def __post_init__(self) -> None:
        settle_number(self, "n", 1, 1024, whole=True)
        settle_number(self, "temperature", 0.0, 100.0)
        settle_number(self, "top_k", -1, LARGEST, whole=True)
        settle_number(self, "top_p", 0.0, 1.0, open_low=True)
        settle_number(self, "min_p", 0.0, 1.0)
        settle_number(self, "repetition_penalty", 0.0, 100.0, open_low=True)
        settle_number(self, "presence_penalty", -2.0, 2.0)
        settle_number(self, "frequency_penalty", -2.0, 2.0)
        settle_number(self, "min_tokens", 0, LARGEST, whole=True)
        settle_number(self, "max_tokens", 1, LARGEST, whole=True, optional=True)
        settle_number(self, "seed", -(2**63), 2**63 - 1, whole=True, optional=True)
        if self.seed == -1:
            self._settle("seed", None)
        settle_number(self, "logprobs", 0, MAX_LOGPROBS, whole=True, optional=True)
        settle_number(self, "prompt_logprobs", 0, MAX_LOGPROBS, whole=True, optional=True)
        settle_number(self, "priority", -(2**63), 2**63 - 1, whole=True)
        settle_number(self, "target_tps", 0.01, 1e6, optional=True)
        self._settle_chosen()
        salt: Any = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT):
            raise ValueError(f"cache_salt must be text of 1 to {MAX_SALT} characters; got {shortened(salt)}")
        check_plain("cache_salt", salt)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}; lower it or raise max_tokens"
            )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "return_hidden_states"):
            check_flag(name, getattr(self, name))
        self._settle("stop", None if self.stop is None else strings("stop", self.stop))
        self._settle("bad_words", None if self.bad_words is None else strings("bad_words", self.bad_words))
        if self.stop_token_ids is not None:
            self._settle("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        if self.bad_words_token_ids is not None:
            self._settle("bad_words_token_ids", sequences("bad_words_token_ids", self.bad_words_token_ids))
        if self.logit_bias is not None:
            self._settle("logit_bias", _biases(self.logit_bias))
        self._check_counts()
        if self.structured_outputs is not None:
            self._settle("structured_outputs", StructuredOutputs.of(self.structured_outputs))
            if self.ignore_eos or self.min_tokens:
                raise ValueError(
                    "a grammar sets where the output ends; with structured_outputs leave out ignore_eos and min_tokens"
                )
        self._settle("speculation", Speculation.of(self.speculation))

    def _settle(self, name: str, value: Any) -> None:
        """Set a field of this frozen class. Called on construction."""
        object.__setattr__(self, name, value)

    def _check_counts(self) -> None:
        """Raises ValueError for lists so long that they would delay other requests."""
        check_count("logit_bias", len(self.logit_bias or ()), MAX_LOGIT_BIASES, "entries")
        check_count("stop_token_ids", len(self.stop_token_ids or ()), MAX_STOP_TOKEN_IDS, "ids")
        check_count("stop", len(self.stops), MAX_STOPS, "strings")
        check_count("stop", sum(map(len, self.stops)), MAX_STOPS_LENGTH, "characters")
        for name, what in (("bad_words", "characters"), ("bad_words_token_ids", "tokens")):
            words = getattr(self, name) or ()
            check_count(name, len(words), MAX_BAD_WORDS, "words")
            check_count(name, sum(map(len, words)), MAX_BAD_WORDS_LENGTH, what)

    def _settle_chosen(self) -> None:
        if self.logprob_token_ids is None:
            return
        chosen = list(dict.fromkeys(token_ids("logprob_token_ids", self.logprob_token_ids)))
        if len(chosen) > MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(f"logprob_token_ids has {len(chosen)} ids; at most {MAX_LOGPROB_TOKEN_IDS} are allowed")
        if self.logprobs is None and self.prompt_logprobs is None:
            raise ValueError(
                "logprob_token_ids would have no effect without logprobs or prompt_logprobs; set one of them, to 0 for "
                "the chosen ids alone"
            )
        self._settle("logprob_token_ids", chosen)

    @property
    def reads_prompt(self) -> bool:
        """Whether every row of the prompt is reported, so that none may come from the prefix cache."""
        return self.prompt_logprobs is not None or self.return_hidden_states

    @property
    def reads_rows(self) -> bool:
        """Whether the host reads a step's rows in addition to its verdict."""
        return self.logprobs is not None or self.reads_prompt

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        return tuple(self.stop or ())

    @property
    def uses_history(self) -> bool:
        """Whether processing the logits of a row needs the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.bad_words)
            or bool(self.bad_words_token_ids)
            or self.structured_outputs is not None
        )


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias takes a mapping from token id to bias; got {shortened(value)}")
    ids = token_ids("logit_bias", list(value))
    return {token: number(f"logit_bias[{token}]", bias, -100.0, 100.0) for token, bias in zip(ids, value.values())}
