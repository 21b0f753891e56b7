"""Mask-token prediction by online self-distillation (arXiv 2602.06019).

The student guesses a window: y_0 at a real row, y_1.. at the masks after it. The frozen teacher, a copy of the base,
reads the same text with the student's own guesses in place of the masks and predicts each of these tokens; the student
learns the teacher's predictions. Since k is drawn from 2..k_max and masks are causal, one block of k_max slots with
weights P(k > slot) trains all k at once. A second term keeps the real rows close to the base's distribution.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F

from stridelm.models.layers.decoder import Decoder
from stridelm.train.accept import measure, slot_weights, windows_of
from stridelm.train.blocks import CHUNKS, block_logits, sample_anchors
from stridelm.train.objective import Validation, compiled, plain_validation_loss, precision
from stridelm.train.settings import MaskSettings
from stridelm.train.windows import step_generator

logger = logging.getLogger(__name__)

PRESS, PRESS_LIMIT = 1.5, 4.0
"""The protecting term grows by this factor when a validation finds the plain loss beyond its limit, up to this many
times its setting. It is bounded because high learning rates raise the loss for a while in any case."""


class MaskObjective:
    """Trains `student` in place; `teacher` is never changed."""

    def __init__(
        self,
        student: Decoder,
        teacher: Decoder,
        valid_VT1: torch.Tensor,
        mask_id: int,
        settings: MaskSettings,
        *,
        seed: int,
        compile: bool,
    ) -> None:
        self.model, self.teacher = student, teacher.requires_grad_(False)
        self.valid, self.mask_id = valid_VT1, mask_id
        self.settings, self.seed = settings, seed
        device = valid_VT1.device
        self.weights_K = slot_weights(settings.k_max).to(device)
        self.protect = settings.protect_weight
        self.base_loss = plain_validation_loss(teacher, valid_VT1)
        self._forward = compiled(_forward, compile)

    def loss(self, ids_BT1: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        s, device = self.settings, ids_BT1.device
        anchors = sample_anchors(ids_BT1.shape[1] - 1, s.anchors, s.k_max - 1, step_generator(self.seed, step))
        mask, kl, text = self._forward(
            self.model,
            self.teacher,
            ids_BT1,
            anchors.to(device, non_blocking=True),
            self.weights_K,
            self.mask_id,
            bool(s.text_weight),
        )
        loss = s.mask_weight * mask + self.protect * kl + s.text_weight * text
        return loss, {"loss": loss.detach(), "mask": mask.detach(), "kl": kl.detach(), "text": text.detach()}

    def validate(self) -> Validation:
        s = self.settings
        metrics = measure(self.model, self.teacher, self.valid, self.mask_id, s.k_max, self.seed)
        rise = metrics["plain_loss"] / self.base_loss - 1
        metrics |= {"base_loss": self.base_loss, "plain_rise": rise, "protect": self.protect}
        if rise > s.plain_limit and self.protect < PRESS_LIMIT * s.protect_weight:
            self.protect *= PRESS
            logger.info("plain loss is %.1f%% above the base's: raised protect_weight to %g", 100 * rise, self.protect)
        return Validation(metrics["mask_loss"] if rise <= s.plain_limit else math.inf, metrics)

    def state(self) -> dict[str, Any]:
        return {"protect": self.protect}

    def restore(self, state: dict[str, Any]) -> None:
        self.protect = state["protect"]


def _forward(
    student: Decoder,
    teacher: Decoder,
    ids_BT1: torch.Tensor,
    anchors_A: torch.Tensor,
    weights_K: torch.Tensor,
    mask_id: int,
    with_text: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mask cross-entropy, KL(base || student), next-token cross-entropy), each a mean in nats per row."""
    real, slots = ids_BT1[:, :-1], len(weights_K)
    masks = torch.full((len(real), len(anchors_A) * slots), mask_id, dtype=real.dtype, device=real.device)
    with precision(real.device):
        real_BTV, block_BAKV = block_logits(student, real, masks, anchors_A, CHUNKS)
        with torch.no_grad():
            guess = windows_of(real_BTV[:, anchors_A], block_BAKV, mask_id)
            base_BTV, base_BAKV = block_logits(teacher, real, guess[:, :, :slots].flatten(1), anchors_A, CHUNKS)
            targets = base_BAKV.argmax(-1)
    ce_BAK = F.cross_entropy(block_BAKV.float().flatten(0, 2), targets.flatten(), reduction="none").view_as(targets)
    mask = (ce_BAK.mean((0, 1)) * weights_K).sum()
    ours, theirs = real_BTV.float().log_softmax(-1), base_BTV.float().log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    text = ours.new_zeros(())
    if with_text:
        text = F.nll_loss(ours.flatten(0, 1), ids_BT1[:, 1:].flatten())
    return mask, kl, text
