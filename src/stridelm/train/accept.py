"""How good a mask student's guesses are: tokens per window under verified greedy decoding, and how much plain decoding
lost by training."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stridelm.models.layers.decoder import Decoder
from stridelm.train.blocks import CHUNKS, block_logits, sample_anchors
from stridelm.train.objective import EVAL_TOKENS, precision
from stridelm.train.windows import step_generator

WINDOWS = (2, 3, 4, 8)
"""The k for which tokens per window are reported (those up to k_max)."""


def slot_weights(k_max: int) -> torch.Tensor:
    """P(k > slot) for k ~ U{2..k_max} and the mask slots 1..k_max-1, summing to 1: [K] float32."""
    slots = torch.arange(1, k_max)
    weights = (k_max - slots.clamp(min=1)) / (k_max - 1)
    return weights / weights.sum()


def windows_of(real_BAV: torch.Tensor, block_BAKV: torch.Tensor, mask_id: int) -> torch.Tensor:
    """The guesses at the anchors' rows and their masks, never the mask token itself: [B, A, K + 1] int64."""
    logits = torch.cat((real_BAV[:, :, None], block_BAKV), dim=2)
    ban = torch.arange(logits.shape[-1], device=logits.device) == mask_id
    return logits.masked_fill(ban, -torch.inf).argmax(-1)


@torch.no_grad()
def measure(
    student: Decoder, base: Decoder, windows_VT1: torch.Tensor, mask_id: int, k_max: int, seed: int = 0
) -> dict[str, float]:
    """Judge a mask student on fixed text windows.

    plain_loss: next-token cross-entropy of real rows, nats per token. mask_loss: cross-entropy of mask rows
    against the base reading the student's guesses, slot-weighted. agreement: share of real rows where student
    and base have the same argmax. tokens_k{k}: tokens per window of k under verified greedy decoding: the guess at the
    real row, and each further one that equals the student's own argmax after reading the guesses before it.
    """
    length, slots = windows_VT1.shape[1] - 1, k_max - 1
    anchors = sample_anchors(length, max(1, min(128, length // 16)), slots, step_generator(seed, 0))
    anchors = anchors.to(windows_VT1.device)
    weights_K = slot_weights(k_max).to(windows_VT1.device)
    sums: dict[str, float] = {}
    with precision(windows_VT1.device):
        for ids in windows_VT1.split(max(1, EVAL_TOKENS // length)):
            for name, value in _judge(student, base, ids, anchors, weights_K, mask_id).items():
                sums[name] = sums.get(name, 0.0) + value.item() * len(ids)
    return {name: total / len(windows_VT1) for name, total in sums.items()}


def _judge(
    student: Decoder,
    base: Decoder,
    ids_BT1: torch.Tensor,
    anchors_A: torch.Tensor,
    weights_K: torch.Tensor,
    mask_id: int,
) -> dict[str, torch.Tensor]:
    real, slots = ids_BT1[:, :-1], len(weights_K)
    masks = torch.full((len(real), len(anchors_A) * slots), mask_id, dtype=real.dtype, device=real.device)
    real_BTV, block_BAKV = block_logits(student, real, masks, anchors_A, CHUNKS)
    guess_BAW = windows_of(real_BTV[:, anchors_A], block_BAKV, mask_id)
    read = guess_BAW[:, :, :slots].flatten(1)
    base_BTV, base_BAKV = block_logits(base, real, read, anchors_A, CHUNKS)
    _, verdict_BAKV = block_logits(student, real, read, anchors_A, CHUNKS)
    right_BAK = guess_BAW[:, :, 1:] == verdict_BAKV.argmax(-1)
    kept_BAK = right_BAK.long().cumprod(-1).double()
    targets = base_BAKV.argmax(-1)
    ce_BAK = F.cross_entropy(block_BAKV.float().flatten(0, 2), targets.flatten(), reduction="none").view_as(targets)
    result = {
        "plain_loss": F.cross_entropy(real_BTV.float().flatten(0, 1), ids_BT1[:, 1:].flatten()),
        "mask_loss": (ce_BAK.mean((0, 1)) * weights_K).sum(),
        "agreement": (real_BTV.argmax(-1) == base_BTV.argmax(-1)).double().mean(),
    }
    for k in WINDOWS:
        if k <= slots + 1:
            result[f"tokens_k{k}"] = 1 + kept_BAK[:, :, : k - 1].sum(-1).mean()
    return result
