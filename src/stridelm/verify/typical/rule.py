"""Typical acceptance (Cai et al. 2024, arXiv 2401.10774): a candidate is taken when the target gives it more
than min(epsilon, alpha exp(-H)), H being the entropy of what the target says. The less sure the target is, the less it
takes. Lossy."""

from __future__ import annotations

import torch

from stridelm.verify.lenient import Lenient
from stridelm.verify.rule import VerifyInput
from stridelm.verify.typical import TypicalOptions


class Typical(Lenient):
    name = "typical"

    def takes(self, inputs: VerifyInput, p_RV: torch.Tensor, p_RW: torch.Tensor) -> torch.Tensor:
        entropy = torch.special.entr(p_RV).sum(-1)
        threshold = inputs.asked(lambda asked: asked.read(TypicalOptions).posterior_threshold)
        alpha = inputs.asked(lambda asked: asked.read(TypicalOptions).posterior_alpha)
        least = torch.minimum(threshold, alpha * (-entropy).exp())
        return p_RW > least[:, None]
