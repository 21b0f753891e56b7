"""Next-token training of a base model."""

from __future__ import annotations

from typing import Any

import torch

from stridelm.models.layers.decoder import Decoder
from stridelm.train.objective import Validation, compiled, next_token_loss, plain_validation_loss, precision
from stridelm.train.settings import BaseSettings
from stridelm.train.windows import step_generator


class BaseObjective:
    """Cross-entropy of the next token; the best checkpoint is the one with the lowest validation loss."""

    def __init__(
        self,
        model: Decoder,
        valid_VT1: torch.Tensor,
        mask_id: int,
        settings: BaseSettings,
        *,
        seed: int,
        compile: bool,
    ) -> None:
        self.model, self.valid, self.mask_id = model, valid_VT1, mask_id
        self.settings, self.seed = settings, seed
        self._forward = compiled(_forward, compile)

    def loss(self, ids_BT1: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs, targets = ids_BT1[:, :-1], ids_BT1[:, 1:]
        if self.settings.input_noise:
            generator = step_generator(self.seed, step, ids_BT1.device)
            noise = torch.rand(inputs.shape, generator=generator, device=inputs.device)
            inputs = inputs.masked_fill(noise < self.settings.input_noise, self.mask_id)
        loss = self._forward(self.model, inputs.contiguous(), targets.contiguous())
        return loss, {"loss": loss.detach()}

    def validate(self) -> Validation:
        loss = plain_validation_loss(self.model, self.valid)
        return Validation(loss, {"plain_loss": loss})

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert not state


def _forward(model: Decoder, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    with precision(inputs_BT.device):
        return next_token_loss(model, inputs_BT, targets_BT)
