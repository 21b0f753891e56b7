"""Relaxed acceptance, as in TensorRT-LLM: a candidate is accepted if it is among the target's N most likely tokens and
its probability is at most delta below the highest. Lossy."""

from __future__ import annotations

import torch

from stridelm.verify.lenient import Lenient
from stridelm.verify.relaxed import RelaxedOptions
from stridelm.verify.rule import VerifyInput


class Relaxed(Lenient):
    name = "relaxed"
    certain = False  # it relaxes greedy decoding too

    def takes(self, inputs: VerifyInput, p_RV: torch.Tensor, p_RW: torch.Tensor) -> torch.Tensor:
        max_topk = max(span.request.speculation.read(RelaxedOptions).relaxed_topk for span in inputs.spans)
        best_RN = p_RV.topk(min(max_topk, p_RV.shape[1])).values
        topk = inputs.asked(lambda asked: asked.read(RelaxedOptions).relaxed_topk)
        last = topk.long().clamp(max=best_RN.shape[1]) - 1
        near = best_RN[:, 0] - inputs.asked(lambda asked: asked.read(RelaxedOptions).relaxed_delta)
        threshold = torch.maximum(best_RN.gather(1, last[:, None])[:, 0], near)
        return (p_RW >= threshold[:, None]) & (p_RW > 0)  # a forbidden token has probability 0, and stays forbidden
