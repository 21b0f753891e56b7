"""Log-probabilities of the raw logits: computed on the device, made vLLM's dictionaries after the step.

Legend: M rows, V vocabulary, N alternatives reported a row.
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
    """[M] int64: 1 plus how many logits are strictly greater."""
    top_ids: torch.Tensor
    """[M, N] int64, the likeliest first, the lowest id first among equals."""
    top_logprobs: torch.Tensor
    """[M, N] float32."""


def raw_logprobs(logits_MV: torch.Tensor, tokens_M: torch.Tensor, top: int = 0) -> RawLogprobs:
    """Report `tokens_M` and the `top` likeliest tokens of each row."""
    chosen_M1 = tokens_M[:, None]
    depth_MV = depths(logits_MV)
    chosen_depth_M1 = depth_MV.gather(1, chosen_M1)
    log_total_M1 = (masses(depth_MV).sum(-1, keepdim=True).double().log() - math.log(UNIT)).float()
    greater_M = (logits_MV > logits_MV.gather(1, chosen_M1)).sum(-1)
    top_ids_MN = top_tokens(logits_MV, min(top, logits_MV.shape[1]))
    return RawLogprobs(
        tokens=tokens_M,
        logprobs=(-chosen_depth_M1 - log_total_M1).squeeze(1),
        ranks=greater_M + 1,
        top_ids=top_ids_MN,
        top_logprobs=-depth_MV.gather(1, top_ids_MN) - log_total_M1,
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


def as_dicts(raw: RawLogprobs, counts: Sequence[int] | None = None) -> list[dict[int, Logprob]]:
    """vLLM's shape: a dictionary a row, first the reported token, which is always there, then the likeliest.

    counts: how many alternatives each row reports; None: all that were computed. Reads the device: call it
    after the step. A token among the alternatives has its place there as its rank.
    """
    if counts is None:
        counts = [raw.top_ids.shape[1]] * raw.tokens.shape[0]
    columns = (raw.tokens, raw.logprobs, raw.ranks, raw.top_ids, raw.top_logprobs)
    token, logprob, rank, top_ids, top_logprobs = (column.tolist() for column in columns)
    rows = [{t: Logprob(p, r)} for t, p, r in zip(token, logprob, rank)]
    for m, count in enumerate(counts):
        likeliest = zip(top_ids[m][:count], top_logprobs[m])
        rows[m].update({t: Logprob(p, place) for place, (t, p) in enumerate(likeliest, start=1)})
    return rows
