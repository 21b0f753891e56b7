"""Log-probabilities of the raw logits: computed on the device, and turned into vLLM's dictionaries when they are read.

Legend: M rows, V vocabulary, N alternatives and K chosen tokens reported per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import overload

import torch

from stridelm.kernels.mass import UNIT, depths, masses
from stridelm.types import Logprob
from stridelm.upload import download

ROWS_AT_ONCE = 256
"""Rows of which a report's intermediate values are held at once: a prompt may have thousands."""
BLOCK = 256
"""Tokens of a block of the vocabulary."""
_LOW32 = 0xFFFFFFFF


@dataclass(slots=True)
class RawLogprobs:
    """Log-probabilities of some rows' tokens and of their most likely alternatives."""

    tokens: torch.Tensor
    """[M] int64: the token reported first."""
    logprobs: torch.Tensor
    """[M] float32, natural logarithm, of the softmax of the raw logits."""
    ranks: torch.Tensor
    """[M] int64: rank among all tokens, the most likely first, the lowest id first among equals."""
    top_ids: torch.Tensor
    """[M, N] int64, the most likely first, the lowest id first among equals."""
    top_logprobs: torch.Tensor
    """[M, N] float32."""
    chosen_ids: torch.Tensor
    """[M, K] int64: the tokens that were requested by id."""
    chosen_logprobs: torch.Tensor
    """[M, K] float32."""


def raw_logprobs(
    logits_MV: torch.Tensor, tokens_M: torch.Tensor, top: int = 0, chosen_MK: torch.Tensor | None = None
) -> RawLogprobs:
    """Report each row's token of `tokens_M`, its `top` most likely tokens and those of `chosen_MK` (int64 ids)."""
    own_M1 = tokens_M[:, None]
    if chosen_MK is None:
        chosen_MK = own_M1[:, :0]
    if len(tokens_M) > ROWS_AT_ONCE:
        columns = (logits_MV, tokens_M, chosen_MK)
        parts = [
            raw_logprobs(logits, tokens, top, chosen)
            for logits, tokens, chosen in zip(*(column.split(ROWS_AT_ONCE) for column in columns), strict=True)
        ]
        return RawLogprobs(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(RawLogprobs)))
    depth_MV = depths(logits_MV)
    log_total_M1 = (masses(depth_MV).sum(-1, keepdim=True).double().log() - math.log(UNIT)).float()
    own_logit_M1 = logits_MV.gather(1, own_M1)
    ids_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
    before_MV = (logits_MV > own_logit_M1) | ((logits_MV == own_logit_M1) & (ids_V < own_M1))
    top_ids_MN = top_tokens(logits_MV, min(top, logits_MV.shape[1]))
    return RawLogprobs(
        tokens=tokens_M,
        logprobs=(-depth_MV.gather(1, own_M1) - log_total_M1).squeeze(1),
        ranks=before_MV.sum(-1) + 1,
        top_ids=top_ids_MN,
        top_logprobs=-depth_MV.gather(1, top_ids_MN) - log_total_M1,
        chosen_ids=chosen_MK,
        chosen_logprobs=-depth_MV.gather(1, chosen_MK) - log_total_M1,
    )


def top_tokens(logits_MV: torch.Tensor, count: int) -> torch.Tensor:
    """[M, count] int64: the most likely tokens, the lowest id first among equals.

    They lie in the `count` blocks of the vocabulary with the largest peaks, the first blocks among equals, so only
    those are searched.
    """
    rows, vocab = logits_MV.shape
    ids_V = torch.arange(vocab, device=logits_MV.device)
    if not count:
        return ids_V.new_empty(rows, 0)
    blocks = -(-vocab // BLOCK)
    if 2 * count > blocks:
        return _first(logits_MV, ids_V, count)
    padded_MV = torch.nn.functional.pad(logits_MV, (0, blocks * BLOCK - vocab), value=-math.inf)
    blocked_MBT = padded_MV.view(rows, blocks, BLOCK)
    best_MC1 = _first(blocked_MBT.amax(-1), ids_V[:blocks], count)[:, :, None]
    ids_MCT = best_MC1 * BLOCK + ids_V[:BLOCK]
    found_MCT = blocked_MBT.gather(1, best_MC1.expand(-1, -1, BLOCK))
    return _first(found_MCT.flatten(1), ids_MCT.flatten(1), count)


def _first(values_MX: torch.Tensor, ids_X: torch.Tensor, count: int) -> torch.Tensor:
    """[M, count] the ids of the largest values, the lowest id first among equals.

    `topk` does not define the order of equals, so it gets integers that are never equal: the float's bits, mapped to
    an integer of the same order, above the complement of the id.
    """
    bits_MX = (values_MX.float() + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    ordered_MX = torch.where(bits_MX < 0, bits_MX ^ 0x7FFFFFFF, bits_MX).long() << 32
    keys_MN = (ordered_MX | (_LOW32 - ids_X)).topk(count, dim=-1).values
    return _LOW32 - (keys_MN & _LOW32)


class HostLogprobs:
    """RawLogprobs on the host. A row's dictionary is made on request: those of all rows of a prompt, with many
    alternatives each, would be millions of objects.

    counts, chosen: how many alternatives and chosen tokens each row reports; None: all that were computed. The copy
    starts on construction; rows may be read once the device has done what was pending then.
    """

    def __init__(
        self, raw: RawLogprobs, counts: Sequence[int] | None = None, chosen: Sequence[int] | None = None
    ) -> None:
        self._own = [download(column) for column in (raw.tokens, raw.logprobs, raw.ranks)]
        self._top = [download(column) for column in (raw.top_ids, raw.top_logprobs)]
        self._chosen = [download(column) for column in (raw.chosen_ids, raw.chosen_logprobs)]
        self._counts, self._chosen_counts = counts, chosen

    def __len__(self) -> int:
        return len(self._own[0])

    def row(self, m: int) -> dict[int, Logprob]:
        """In vLLM's format: first the reported token, which is always there, then the most likely tokens, then those
        requested by id. A token among the alternatives has its place there as its rank."""
        token, logprob, rank = (column[m].item() for column in self._own)
        count = None if self._counts is None else self._counts[m]
        chosen = None if self._chosen_counts is None else self._chosen_counts[m]
        top_ids, top_logprobs = (column[m, :count].tolist() for column in self._top)
        chosen_ids, chosen_logprobs = (column[m, :chosen].tolist() for column in self._chosen)
        entry = {token: Logprob(logprob, rank)}
        entry.update({t: Logprob(p, place) for place, (t, p) in enumerate(zip(top_ids, top_logprobs), start=1)})
        for t, p in zip(chosen_ids, chosen_logprobs):
            entry.setdefault(t, Logprob(p, None))
        return entry


def as_dicts(
    raw: RawLogprobs, counts: Sequence[int] | None = None, chosen: Sequence[int] | None = None
) -> list[dict[int, Logprob]]:
    """All rows of HostLogprobs."""
    rows = HostLogprobs(raw, counts, chosen)
    return [rows.row(m) for m in range(len(rows))]


class PromptLogprobs(Sequence["dict[int, Logprob] | None"]):
    """Log-probabilities of a prompt's tokens by position, each made when it is read; None for the first token, which
    has no context."""

    def __init__(self, length: int) -> None:
        """length: of the prompt, in tokens."""
        self._length = length
        self._rows: dict[int, tuple[HostLogprobs, int]] = {}
        self.text_of: Callable[[int], str] | None = None
        """Returns a token's text; None: entries have no text."""

    def put(self, position: int, rows: HostLogprobs, m: int) -> None:
        """Row `m` of `rows` reports the token at `position`."""
        self._rows[position] = rows, m

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, position: int) -> dict[int, Logprob] | None: ...

    @overload
    def __getitem__(self, position: slice) -> list[dict[int, Logprob] | None]: ...

    def __getitem__(self, position: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        if isinstance(position, slice):
            return [self[index] for index in range(*position.indices(self._length))]
        if not 0 <= position < self._length:
            raise IndexError(position)
        source = self._rows.get(position)
        if source is None:
            return None
        rows, m = source
        entry = rows.row(m)
        if self.text_of is not None:
            for token, logprob in entry.items():
                logprob.decoded_token = self.text_of(token)
        return entry
