"""Relaxed acceptance, as in TensorRT-LLM: a candidate is taken when it is among the target's N likeliest tokens and at
most delta less likely than the likeliest. Lossy."""

from __future__ import annotations

import torch

from stridelm.params import Speculation
from stridelm.verify.lenient import Lenient
from stridelm.verify.rule import VerifyInput

TOPK, DELTA = 10, 0.6
"""TensorRT-LLM's recommendation for DeepSeek-R1."""


class Relaxed(Lenient):
    name = "relaxed"
    certain = False  # it relaxes greedy decoding too
    options = frozenset({"relaxed_topk", "relaxed_delta"})

    def takes(self, inputs: VerifyInput, p_RV: torch.Tensor, p_RW: torch.Tensor) -> torch.Tensor:
        most = max(_topk(span.request.speculation) for span in inputs.spans)
        best_RN = p_RV.topk(min(most, p_RV.shape[1])).values
        last = inputs.asked(_topk).long().clamp(max=best_RN.shape[1]) - 1
        near = best_RN[:, 0] - inputs.asked(_delta)
        least = torch.maximum(best_RN.gather(1, last[:, None])[:, 0], near)
        return (p_RW >= least[:, None]) & (p_RW > 0)  # what is forbidden stays so


def _topk(speculation: Speculation) -> int:
    return speculation.relaxed_topk or TOPK


def _delta(speculation: Speculation) -> float:
    return DELTA if speculation.relaxed_delta is None else speculation.relaxed_delta
