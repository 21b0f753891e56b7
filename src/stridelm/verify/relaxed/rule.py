"""Relaxed acceptance, as in TensorRT-LLM: a candidate is taken when it is among the target's N likeliest tokens and at
most delta less likely than the likeliest. Lossy."""

from __future__ import annotations

import torch

from stridelm.verify.lenient import Lenient
from stridelm.verify.relaxed import RelaxedOptions
from stridelm.verify.rule import VerifyInput


class Relaxed(Lenient):
    name = "relaxed"
    certain = False  # it relaxes greedy decoding too

    def takes(self, inputs: VerifyInput, p_RV: torch.Tensor, p_RW: torch.Tensor) -> torch.Tensor:
        most = max(span.request.speculation.read(RelaxedOptions).relaxed_topk for span in inputs.spans)
        best_RN = p_RV.topk(min(most, p_RV.shape[1])).values
        topk = inputs.asked(lambda asked: asked.read(RelaxedOptions).relaxed_topk)
        last = topk.long().clamp(max=best_RN.shape[1]) - 1
        near = best_RN[:, 0] - inputs.asked(lambda asked: asked.read(RelaxedOptions).relaxed_delta)
        least = torch.maximum(best_RN.gather(1, last[:, None])[:, 0], near)
        return (p_RW >= least[:, None]) & (p_RW > 0)  # what is forbidden stays so
