"""Typical acceptance (Cai et al. 2024, arXiv 2401.10774): a candidate is accepted if the target gives it a probability
above min(epsilon, alpha exp(-H)), where H is the entropy of the target's distribution. The less sure the target is, the
lower the threshold. Lossy."""

from __future__ import annotations

import torch

from stridelm.verify.lenient import Lenient
from stridelm.verify.rule import VerifyInput
from stridelm.verify.typical import TypicalOptions


class Typical(Lenient):
    name = "typical"

    def takes(self, inputs: VerifyInput, p_RV: torch.Tensor, p_RW: torch.Tensor) -> torch.Tensor:
        entropy = torch.special.entr(p_RV).sum(-1)
        epsilon = inputs.asked(lambda asked: asked.read(TypicalOptions).posterior_threshold)
        alpha = inputs.asked(lambda asked: asked.read(TypicalOptions).posterior_alpha)
        threshold = torch.minimum(epsilon, alpha * (-entropy).exp())
        return p_RW > threshold[:, None]
