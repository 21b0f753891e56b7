"""Speculative sampling: the output has the target's distribution, whatever the draft's is (Leviathan et al. 2023, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318).

A child that holds x, drawn from q where the target's distribution is p, is accepted with probability
min(1, p(x) / q(x)). If it is rejected, p becomes (p - q)+ and q loses x, both are normalised again, and the next child
is tested: siblings are drawn without replacement (Jeon et al. 2024, arXiv 2402.14160). When no child is left, the token
is drawn from the p that remains; where no child was tested, that is the target's own. In a draft without probabilities,
q puts all mass on x: the child is accepted with probability p(x), and p loses x.

Legend: R spans, W draft rows, V vocabulary.
"""

from __future__ import annotations

import torch

from stridelm.batch import Draft, Verdict
from stridelm.verify.attempt import Weighing, candidate_rows, chances, end_at, target_at, tokens_at
from stridelm.verify.rule import VerifyInput


class Rejection(Weighing):
    name = "rejection"
    lossless = True
    reads_probs = True

    def decide(self, inputs: VerifyInput) -> Verdict:
        draft, chance_RK = inputs.draft, chances(inputs)
        candidates_RW = draft.valid_candidates
        leaf = torch.full_like(inputs.slots, -1)
        p_RV = target_at(inputs, -1)
        refused_RV = torch.zeros_like(p_RV, dtype=torch.bool)  # tokens of the leaf's rejected children
        for row in candidate_rows(draft):
            child = candidates_RW[:, row] & (draft.parents[:, row] == leaf)
            token = tokens_at(draft, row)
            q_RV = drafted_at(draft, row, refused_RV)
            accepted = child & (chance_RK[:, row + 1] * at(q_RV, token) < at(p_RV, token))
            refused = (child & ~accepted)[:, None]
            p_RV = torch.where(refused, normalised(less(p_RV, q_RV, token), p_RV), p_RV)
            p_RV = torch.where(accepted[:, None], target_at(inputs, row), p_RV)
            refused_RV = refused_RV.scatter(1, token, refused | refused_RV.gather(1, token)) & ~accepted[:, None]
            leaf = torch.where(accepted, row, leaf)
        return end_at(inputs, leaf, p_RV)


def drafted_at(draft: Draft, row: int, refused_RV: torch.Tensor) -> torch.Tensor | None:
    """[R, V] the distribution the row's token was drawn from, given the siblings refused so far; None: all mass is on
    the token."""
    if draft.probs is None:
        return None
    if draft.is_chain:  # no row has siblings
        return draft.probs[:, row]
    q_RV = draft.probs[:, row].masked_fill(refused_RV, 0.0)
    return normalised(q_RV, q_RV)


def at(q_RV: torch.Tensor | None, token: torch.Tensor) -> torch.Tensor | float:
    """[R] the probability of each row's token [R, 1]."""
    return 1.0 if q_RV is None else q_RV.gather(1, token)[:, 0]


def less(p_RV: torch.Tensor, q_RV: torch.Tensor | None, token: torch.Tensor) -> torch.Tensor:
    """[R, V] (p - q)+, for a p of any mass up to 1. A q of None puts all mass on `token`, which p then loses."""
    return p_RV.scatter(1, token, 0.0) if q_RV is None else (p_RV - q_RV).clamp(min=0.0)


def normalised(weights_RV: torch.Tensor, otherwise_RV: torch.Tensor) -> torch.Tensor:
    """[R, V] scaled to a sum of 1; `otherwise` where rounding left nothing, which only happens where p and q are equal
    up to rounding."""
    total = weights_RV.sum(-1, keepdim=True)
    return torch.where(total > 0, weights_RV / total, otherwise_RV)
