"""Typical acceptance (Cai et al. 2024, arXiv 2401.10774): a candidate is taken when the target gives it more
than min(epsilon, alpha exp(-H)), H being the entropy of what the target says. The less sure the target is, the less it
takes. Lossy."""

from __future__ import annotations

import torch

from stridelm.params import Speculation
from stridelm.verify.lenient import Lenient
from stridelm.verify.rule import VerifyInput

THRESHOLD, ALPHA = 0.09, 0.3
"""The paper's, and vLLM's."""


class Typical(Lenient):
    name = "typical"
    options = frozenset({"posterior_threshold", "posterior_alpha"})

    def takes(self, inputs: VerifyInput, p_RV: torch.Tensor, p_RW: torch.Tensor) -> torch.Tensor:
        entropy = torch.special.entr(p_RV).sum(-1)
        threshold, alpha = inputs.asked(_threshold), inputs.asked(_alpha)
        least = torch.minimum(threshold, alpha * (-entropy).exp())
        return p_RW > least[:, None]


def _threshold(speculation: Speculation) -> float:
    return THRESHOLD if speculation.posterior_threshold is None else speculation.posterior_threshold


def _alpha(speculation: Speculation) -> float:
    return ALPHA if speculation.posterior_alpha is None else speculation.posterior_alpha
