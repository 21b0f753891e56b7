"""Mask-token decoding from its definition (arXiv 2602.06019): no cache, no batch, every step from scratch.

A step feeds all tokens so far and k - 1 masks to a plain transformers model and reads the last k rows. Static k emits
the k tokens drawn there; confidence-adaptive decoding emits the longest prefix of them whose largest softmax is at
least tau, and always one. A stop token ends the request inside the window, and the length limit cuts inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stridelm import SamplingParams
from support.oracles.sampling import draw


@dataclass
class Decoded:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    steps: int = 0
    margin: float = float("inf")
    """The closest call of any decision: a lead in logits, or a distance from tau. If it is small, rounding could flip
    the decision."""


@torch.inference_mode()
def decode(
    model: Any,
    prompt: Sequence[int],
    params: SamplingParams,
    k: int,
    mask_ids: Sequence[int],
    *,
    tau: float | None = None,
    eos_ids: Sequence[int] = (),
    sample_index: int = 0,
) -> Decoded:
    """mask_ids: one id for all offsets, or one for each."""
    masks = [mask_ids[0] if len(mask_ids) == 1 else mask_ids[offset] for offset in range(k - 1)]
    stops = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stops |= set(eos_ids)
    held_back = {*eos_ids, *(params.stop_token_ids or ())}
    done = Decoded()
    while done.finish_reason is None:
        ids = torch.tensor([[*prompt, *done.tokens, *masks]])
        rows = model(ids).logits[0, -k:].float()
        window: list[int] = []
        leads: list[float] = []
        for row in rows:
            history = done.tokens + window
            token, lead = draw(row, prompt, history, params, sorted(held_back), sample_index)
            window.append(token)
            leads.append(lead)
        done.steps += 1
        for token, lead in list(zip(window, leads))[: _sure(rows, tau, done)]:
            done.tokens.append(token)
            done.margin = min(done.margin, lead)
            if token in stops and len(done.tokens) >= params.min_tokens:
                done.finish_reason = "stop"
            elif len(done.tokens) == params.max_tokens:
                done.finish_reason = "length"
            if done.finish_reason:
                break
    return done


def _sure(rows_kV: torch.Tensor, tau: float | None, done: Decoded) -> int:
    """The length of the confident prefix of the window; the first row always counts."""
    if tau is None:
        return len(rows_kV)
    count = 1
    for peak in rows_kV[1:].softmax(-1).amax(-1).tolist():
        done.margin = min(done.margin, abs(peak - tau))
        if peak < tau:
            break
        count += 1
    return count
