"""The sampling parameters of the running requests as device tensors, one row per slot.

A row is written once, when its request is admitted. The host keeps which features each slot needs, so that a step does
only the work that some request in it needs, and never reads the device to find out.

Legend: S slots, P stop ids, C logit biases, B bad words, L tokens of all bad words of a slot, A numbers of accepted
tokens.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from hashlib import blake2b
from operator import or_
from typing import TYPE_CHECKING, Any

import torch

from stridelm.sample.length import NUMBERS, log_odds

if TYPE_CHECKING:
    from stridelm.grammar.guide import Guide
    from stridelm.params import SamplingParams
    from stridelm.types import Request

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: the most likely token, without noise."""
_ROOM = 8
"""Entries per slot of a list when it is first needed."""
_CAPTURED_ROOM = {"stop_ids": 1280, "bias_ids": 4096, "bias": 4096, "bad_tokens": 8192, "bad_ends": 1024}
"""The same from the start, where steps are captured: a list that grows invalidates graphs. As much as parameters may
list, but for bad words of many tokens per character."""


class Feature(enum.IntFlag):
    """What a row needs beyond an argmax of its raw logits, in the order in which it is applied."""

    GRAMMAR = 1
    BAD_WORDS = 2
    BIAS = 4
    MIN_TOKENS = 8
    PENALTIES = 16
    SAMPLED = 32
    MIN_P = 64
    TOP_K = 128
    TOP_P = 256
    TRUNCATED = MIN_P | TOP_K | TOP_P
    LISTED = BAD_WORDS | BIAS | MIN_TOKENS
    EDITED = GRAMMAR | LISTED | PENALTIES
    ALL = EDITED | SAMPLED | TRUNCATED


class SamplingTable:
    """One row of parameters per slot, and one for padding. `check_token_ids` has made sure that every id is in
    [0, vocab_size)."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        slots += 1  # the last row is padding's, which has slot -1
        self._floats = torch.ones(slots, 6, dtype=torch.float32, device=self.device)
        self._ints = torch.zeros(slots, 6, dtype=torch.int64, device=self.device)
        (
            self.temperature,
            self.top_p,
            self.log_min_p,
            self.repetition,
            self.presence,
            self.frequency,
        ) = self._floats.unbind(1)
        self.seed, self.sample_index, self.top_k, self.prompt_len, self.min_tokens, self.needs = self._ints.unbind(1)
        # needs: the slot's features, as bits, for kernels.
        self.sampled = torch.zeros(slots, dtype=torch.bool, device=self.device)
        """[S] whether the slot's tokens are drawn with noise (Feature.SAMPLED)."""
        self.length_odds = torch.zeros(slots, NUMBERS, dtype=torch.float32, device=self.device)
        """[S, A] log-probabilities of the numbers that a simulated step accepts; any others' are not read."""
        room = _CAPTURED_ROOM if self.device.type == "cuda" else dict.fromkeys(_CAPTURED_ROOM, 0)
        self.stop_ids = self._list(slots, room["stop_ids"], fill=-1)
        """[S, P] int64, padded with -1."""
        self.bias_ids = self._list(slots, room["bias_ids"])
        self.bias = self._list(slots, room["bias"], dtype=torch.float32)
        """[S, C] float32 to be added at bias_ids [S, C] int64; padding adds 0 to token 0."""
        self.bad_tokens = self._list(slots, room["bad_tokens"])
        """[S, L] int64 the bad words' tokens, concatenated, so that no word is padded to the longest."""
        self.bad_ends = self._list(slots, room["bad_ends"])
        """[S, B] int64 end of each word in `bad_tokens`; 0: no word."""
        self.generation = 0
        """Counts how often a list has grown, which replaces its tensor: a captured step that reads lists
        (Feature.LISTED) is valid only for the generation in which it was captured."""
        self._features = [Feature(0)] * slots
        self._guides: list[Guide | None] = [None] * slots

    def set(
        self,
        slot: int,
        request: Request,
        stop_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        guide: Guide | None = None,
    ) -> None:
        """Write a request's parameters.

        stop_ids: every token that ends it, eos and its own. bad_words: token ids of each. guide: that of its grammar.
        """
        params = request.params
        features = _features(params, bool(bad_words), bool(stop_ids), self.vocab_size)
        features |= Feature.GRAMMAR if guide is not None else Feature(0)
        self._guides[slot] = guide
        self._features[slot] = features
        self.sampled[slot].fill_(bool(features & Feature.SAMPLED))
        _copy(self._floats[slot], _float_row(params))
        _copy(self._ints[slot], _int_row(request, features))
        speculation = request.speculation
        if speculation.acceptance_length is not None:
            _copy(self.length_odds[slot], log_odds(speculation.acceptance_length, speculation.depth or 0))
        if features & Feature.MIN_TOKENS:
            self._set_stop_ids(slot, stop_ids)
        if features & Feature.BIAS:
            self._set_bias(slot, params.logit_bias or {})
        if features & Feature.BAD_WORDS:
            self._set_bad_words(slot, bad_words)

    def features(self, slot: int) -> Feature:
        """What the slot's request needs. Never reads the device."""
        return self._features[slot]

    def features_of(self, slots: Iterable[int]) -> Feature:
        """What any of the slots' requests needs."""
        return reduce(or_, {self._features[slot] for slot in slots}, Feature(0))

    def guide(self, slot: int) -> Guide | None:
        """The slot's grammar, if its request has one."""
        return self._guides[slot]

    def mask_s(self, slot: int) -> float | None:
        """Seconds that a mask of the slot's grammar takes, on average."""
        guide = self._guides[slot]
        return None if guide is None else guide.grammar.mask_s

    @contextmanager
    def assuming(self, features: Feature) -> Iterator[None]:
        """The padding slot stands for requests with these features while a step is captured."""
        self._features[-1] = features
        try:
            yield
        finally:
            self._features[-1] = Feature(0)

    def _set_stop_ids(self, slot: int, stop_ids: Sequence[int]) -> None:
        # A tokenizer may have an eos that the model has no logit for: it is never drawn and needs no mask.
        drawable = [i for i in stop_ids if 0 <= i < self.vocab_size]
        self.stop_ids = self._widened(self.stop_ids, len(drawable), fill=-1)
        _copy(self.stop_ids[slot], _padded(drawable, self.stop_ids.shape[1], -1))

    def _set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        assert all(0 <= i < self.vocab_size for i in bias), "logit_bias outside the vocabulary"
        ids, values = (self._widened(table, len(bias), fill=0) for table in (self.bias_ids, self.bias))
        self.bias_ids, self.bias = ids, values
        _copy(self.bias_ids[slot], _padded(list(bias.keys()), self.bias_ids.shape[1], 0))
        _copy(self.bias[slot], _padded(list(bias.values()), self.bias.shape[1], 0))

    def _set_bad_words(self, slot: int, bad_words: Sequence[Sequence[int]]) -> None:
        assert all(0 <= word[-1] < self.vocab_size for word in bad_words), "bad word outside the vocabulary"
        tokens = [token for word in bad_words for token in word]
        ends = list(itertools.accumulate(len(word) for word in bad_words))
        tables = (self._widened(self.bad_tokens, len(tokens), fill=0), self._widened(self.bad_ends, len(ends), fill=0))
        self.bad_tokens, self.bad_ends = tables  # both or neither: allocating the second may fail
        _copy(self.bad_tokens[slot], _padded(tokens, self.bad_tokens.shape[1], 0))
        _copy(self.bad_ends[slot], _padded(ends, self.bad_ends.shape[1], 0))

    def _list(self, *shape: int, fill: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, fill, dtype=dtype, device=self.device)

    def _widened(self, table: torch.Tensor, width: int, fill: int) -> torch.Tensor:
        """The table with room for `width` entries per slot; the width doubles, so that growing stays rare."""
        slots, have = table.shape
        if width <= have:
            return table
        self.generation += 1
        return torch.cat((table, table.new_full((slots, max(width, 2 * have, _ROOM) - have), fill)), 1)


def check_token_ids(params: SamplingParams, vocab_size: int, bad_words: Sequence[Sequence[int]] = ()) -> None:
    """Raise ValueError if logit_bias or a bad word names a token that the model has no logit for."""
    named = {
        "logit_bias": params.logit_bias or (),
        "bad_words": [token for word in bad_words for token in word],
    }
    for name, ids in named.items():
        outside = sorted({i for i in ids if not 0 <= i < vocab_size})
        if outside:
            raise ValueError(f"{name} names ids {outside} outside the vocabulary of {vocab_size}; remove them")


def _features(params: SamplingParams, has_bad_words: bool, has_stop_ids: bool, vocab_size: int) -> Feature:
    """What a request needs. Truncation never removes the most likely token, so a greedy request does not need it."""
    sampled = params.temperature >= GREEDY_BELOW
    needs = {
        Feature.BAD_WORDS: has_bad_words,
        Feature.BIAS: bool(params.logit_bias),
        Feature.MIN_TOKENS: params.min_tokens > 0 and has_stop_ids,
        Feature.PENALTIES: params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0,
        Feature.SAMPLED: sampled,
        Feature.MIN_P: sampled and params.min_p > 0.0,
        Feature.TOP_K: sampled and 0 < params.top_k < vocab_size,
        Feature.TOP_P: sampled and params.top_p < 1.0,
    }
    features = Feature(0)
    for feature, needed in needs.items():
        features |= feature if needed else Feature(0)
    return features


def _float_row(params: SamplingParams) -> list[float]:
    """The columns of `_floats`, in order. A greedy row's temperature is never used; 1 keeps it finite."""
    return [
        params.temperature if params.temperature >= GREEDY_BELOW else 1.0,
        params.top_p,
        math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    ]


def _int_row(request: Request, features: Feature) -> list[int]:
    """The columns of `_ints`, in order."""
    params = request.params
    seed = _signed64(_renewed(request.seed, request.arrival) if request.renews_noise else request.seed)
    return [seed, request.sample_index, params.top_k, len(request.prompt_ids), params.min_tokens, features.value]


def _renewed(seed: int, arrival: int) -> int:
    """The seed of the noise of one request alone: no other of an engine has its place in the order of arrival. The same
    in every process, so on every rank of a sharded model."""
    return int.from_bytes(blake2b(f"{seed} {arrival}".encode(), digest_size=8).digest(), "little")


def _signed64(seed: int) -> int:
    """The int64 with the seed's low 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


def _copy(row: torch.Tensor, values: list[Any]) -> None:
    """Write host values into a row of a table, without waiting for the device."""
    row.copy_(torch.tensor(values, dtype=row.dtype).view(row.shape), non_blocking=True)


def _padded(values: list[Any], width: int, fill: Any) -> list[Any]:
    return values + [fill] * (width - len(values))
