"""Log-probabilities of the raw logits: computed on the device, made vLLM's dictionaries after the step.

Legend: M rows, V vocabulary, N alternatives and K chosen tokens reported a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stridelm.sample.mass import UNIT, depths, masses
from stridelm.types import Logprob

_LOW32 = 0xFFFFFFFF


@dataclass(slots=True)
class RawLogprobs:
    """Log-probabilities of some rows' tokens and of their likeliest alternatives."""

    tokens: torch.Tensor
    """[M] int64: the token reported first."""
    logprobs: torch.Tensor
    """[M] float32, natural logarithm, of the softmax of the raw logits."""
    ranks: torch.Tensor
    """[M] int64: place among all tokens, the likeliest first, the lowest id first among equals."""
    top_ids: torch.Tensor
    """[M, N] int64, the likeliest first, the lowest id first among equals."""
    top_logprobs: torch.Tensor
    """[M, N] float32."""
    chosen_ids: torch.Tensor
    """[M, K] int64: the tokens that were asked for by id."""
    chosen_logprobs: torch.Tensor
    """[M, K] float32."""


def raw_logprobs(
    logits_MV: torch.Tensor, tokens_M: torch.Tensor, top: int = 0, chosen_MK: torch.Tensor | None = None
) -> RawLogprobs:
    """Report `tokens_M`, the `top` likeliest tokens and those of `chosen_MK` (int64 ids), of each row."""
    own_M1 = tokens_M[:, None]
    if chosen_MK is None:
        chosen_MK = own_M1[:, :0]
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
    """[M, count] int64: the likeliest tokens, the lowest id first among equals.

    `topk` leaves the order of equals open, so it is given whole numbers that are never equal: the float's
    bits, turned so that they are ordered as integers, above the complement of the id.
    """
    if not count:
        return torch.empty(logits_MV.shape[0], 0, dtype=torch.int64, device=logits_MV.device)
    bits_MV = (logits_MV.float() + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    ordered_MV = torch.where(bits_MV < 0, bits_MV ^ 0x7FFFFFFF, bits_MV).long() << 32
    complement_V = _LOW32 - torch.arange(logits_MV.shape[1], device=logits_MV.device)
    keys_MN = (ordered_MV | complement_V).topk(count, dim=-1).values
    return _LOW32 - (keys_MN & _LOW32)


def as_dicts(
    raw: RawLogprobs, counts: Sequence[int] | None = None, chosen: Sequence[int] | None = None
) -> list[dict[int, Logprob]]:
    """vLLM's shape: a dictionary a row, first the reported token, which is always there, then the likeliest, then those
    asked for by id.

    counts, chosen: how many alternatives and chosen tokens each row reports; None: all that were computed. Reads the
    device: call it after the step. A token among the alternatives has its place there as its rank.
    """
    if counts is None:
        counts = [raw.top_ids.shape[1]] * raw.tokens.shape[0]
    if chosen is None:
        chosen = [raw.chosen_ids.shape[1]] * raw.tokens.shape[0]
    columns = (raw.tokens, raw.logprobs, raw.ranks, raw.top_ids, raw.top_logprobs, raw.chosen_ids, raw.chosen_logprobs)
    token, logprob, rank, top_ids, top_logprobs, chosen_ids, chosen_logprobs = (column.tolist() for column in columns)
    rows = [{t: Logprob(p, r)} for t, p, r in zip(token, logprob, rank)]
    for m, entry in enumerate(rows):
        likeliest = zip(top_ids[m][: counts[m]], top_logprobs[m])
        entry.update({t: Logprob(p, place) for place, (t, p) in enumerate(likeliest, start=1)})
        for t, p in zip(chosen_ids[m][: chosen[m]], chosen_logprobs[m]):
            entry.setdefault(t, Logprob(p, None))
    return rows
