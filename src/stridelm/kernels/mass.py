"""Probability mass as integers, so that sums do not depend on their order.

The last bits of a float sum depend on the order of its terms, which libraries choose by shape: a row's nucleus could
then depend on the rows beside it. Integer sums are exact. Weights exp(x - max) are at most 1, so in units of 2**-40 a
vocabulary's sum stays far inside int64, and what is rounded away is below 2**-40 of the most probable token's mass.

Legend: M rows, V vocabulary.
"""

from __future__ import annotations

import torch

UNIT = 2.0**40
"""The mass of the most probable token."""

FAR = 32.0
"""A depth from which tokens have no mass: exp(-32) is below 2**-46."""

_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Shift and width, in bits, of the digits of a non-negative float32's 31 bits."""


def depths(logits_MV: torch.Tensor) -> torch.Tensor:
    """How far each logit lies below its row's largest: float32 [M, V], at least 0, infinite for -inf."""
    logits_MV = logits_MV.float()
    # Clamped, because a row of nothing but -inf would give NaN. Plus zero, because -0.0 - 0.0 would have a sign.
    return logits_MV.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min).add_(0.0) - logits_MV


def weights(depths_MV: torch.Tensor) -> torch.Tensor:
    """exp(-depth), float32 [M, V]; of depths beyond FAR, exp(-FAR): processors are slow with subnormal numbers."""
    return depths_MV.clamp(max=FAR).neg_().exp_()


def masses(depths_MV: torch.Tensor) -> torch.Tensor:
    """exp(-depth) in units of 1 / UNIT, rounded down: int64 [M, V]."""
    return weights(depths_MV).mul_(UNIT).long()


def nucleus(depths_MV: torch.Tensor, top_p_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of the nucleus, (edge [M] float32, last [M] int64): it holds all tokens of depth below the edge and,
    of those at the edge, the ids up to the last.

    A token is kept if the mass before it, in order of depth and then of id, is below top_p of the row's mass. Found by
    radix selection (three histograms of mass), which at large vocabularies costs far less than a sort. Logits so close
    that their depths round to the same float32 count as equal.
    """
    mass_MV = masses(depths_MV)
    limit_M1 = (mass_MV.sum(-1, keepdim=True) * top_p_M.double()[:, None]).ceil_().long()
    key_MV = depths_MV.view(torch.int32).long()  # the bits of non-negative floats have the floats' order
    edge_M1, spent_M1 = _edge(key_MV, mass_MV, limit_M1)
    depth_M1 = edge_M1.int().view(torch.float32)
    edge_mass_M1 = masses(depth_M1).clamp_(min=1)
    tied_MV = key_MV == edge_M1
    # Keep as many of the tied as are needed: the mass before the last of them is below the limit.
    taken_M1 = (limit_M1 - spent_M1 + edge_mass_M1 - 1) // edge_mass_M1
    return depth_M1[:, 0], torch.searchsorted(tied_MV.cumsum(-1), taken_M1)[:, 0]


def _edge(key_MV: torch.Tensor, mass_MV: torch.Tensor, limit_M1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest key up to which the mass reaches the limit, and the mass below it: int64 [M, 1] each.

    Finds one digit of the edge at a time, from the highest. Each histogram has one bucket per digit value, between one
    for all keys below the digits found so far and one for all keys above them.
    """
    edge_M1, spent_M1 = torch.zeros_like(limit_M1), limit_M1
    bucket_MV = torch.empty_like(key_MV)
    for shift, width in _DIGITS:
        last = 1 << width
        torch.bitwise_right_shift(key_MV, shift, out=bucket_MV)
        bucket_MV.sub_((edge_M1 << width) - 1).clamp_(0, last + 1)
        buckets = mass_MV.new_zeros(mass_MV.shape[0], last + 2).scatter_add_(1, bucket_MV, mass_MV)
        upto = buckets.cumsum(-1)
        under = upto < limit_M1
        edge_M1 = (edge_M1 << width) + under.sum(-1, keepdim=True) - 1
        spent_M1 = (upto * under).amax(-1, keepdim=True)
    return edge_M1, spent_M1
