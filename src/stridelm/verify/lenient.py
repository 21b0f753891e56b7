"""Shared by the lossy rules for candidates: a token that the target finds likely enough is acceptable, and the longest
path of such tokens is accepted. The token after it is drawn as under the exact rule.

Legend: R spans, W draft rows, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from stridelm.batch import Draft, Verdict
from stridelm.verify.attempt import Weighing, candidate_rows, follow, path_to, target_at
from stridelm.verify.exact import draw_nodes
from stridelm.verify.rule import VerifyInput


class Lenient(Weighing):
    lossless = False
    certain: ClassVar[bool] = True
    """A greedy request's target puts all mass on its argmax; if False, its distribution is that of temperature 1."""

    def decide(self, inputs: VerifyInput) -> Verdict:
        draft = inputs.draft
        taken_RW = torch.zeros_like(draft.valid)
        for row in (-1, *candidate_rows(draft)) if draft.max_depth else ():
            p_RV = target_at(inputs, row, certain=self.certain)
            likely_RW = self.takes(inputs, p_RV, p_RV.gather(1, draft.tokens))
            taken_RW = torch.where(draft.parents == row, likely_RW, taken_RW)
        leaf = deepest(draft, taken_RW & draft.valid_candidates)
        return follow(inputs, path_to(draft, leaf), draw_nodes(inputs))

    def takes(self, inputs: VerifyInput, p_RV: torch.Tensor, p_RW: torch.Tensor) -> torch.Tensor:
        """[R, W] bool: which tokens are acceptable where the target's distribution is p_RV; it gives them p_RW."""
        raise NotImplementedError


def deepest(draft: Draft, taken_RW: torch.Tensor) -> torch.Tensor:
    """[R] the end of the longest path of acceptable rows, the first of several; -1 if there is none."""
    if not draft.width:
        return draft.tokens.new_full((len(draft.tokens),), -1)
    bit = 1 << torch.arange(draft.width, device=taken_RW.device)
    # One bit per row, so the sum is the union.
    taken = torch.where(taken_RW, bit, 0).sum(1, keepdim=True)
    whole_RW = taken_RW & ((draft.ancestors & ~taken) == 0)
    length, leaf = torch.where(whole_RW, draft.depths, 0).max(1)
    return torch.where(length > 0, leaf, -1)
