"""What the training loop asks of an objective, and the pieces that objectives share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F

from stridelm.models.layers.decoder import Decoder
from stridelm.train.dense import DenseAttend, flat_positions

EVAL_TOKENS = 32_768
"""Tokens of a validation batch."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Validation:
    """score: what the best checkpoint minimises (infinite: not to be kept). metrics: everything worth a log line."""

    score: float
    metrics: dict[str, float]


class Objective(Protocol):
    """A loss over windows and a judgement on a fixed validation set."""

    model: Decoder

    def loss(self, ids_BT1: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The scalar to minimise, and detached scalars to log, for windows [B, T + 1]."""
        ...

    def validate(self) -> Validation: ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the weights."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


def precision(device: torch.device) -> torch.autocast:
    """bfloat16 products over float32 weights on CUDA; plain float32 elsewhere.

    Each weight is used once a pass, so autocast's cache of casts would only hold memory.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def compiled(function: Function, wanted: bool) -> Function:
    """`torch.compile` for fixed shapes, where wanted."""
    return torch.compile(function, dynamic=False) if wanted else function  # type: ignore[return-value]


def plain_hidden(model: Decoder, ids_BT: torch.Tensor) -> torch.Tensor:
    """Causal forward over B sequences: [B * T, hidden]."""
    batch, length = ids_BT.shape
    return model(ids_BT.flatten(), flat_positions(batch, length, ids_BT.device), DenseAttend(batch))


def next_token_loss(model: Decoder, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a token."""
    logits = model.logits(plain_hidden(model, inputs_BT))
    return F.cross_entropy(logits.float(), targets_BT.flatten())


@torch.no_grad()
def plain_validation_loss(model: Decoder, windows_VT1: torch.Tensor) -> float:
    """Mean next-token cross-entropy over fixed windows, in nats a token."""
    total, rows = 0.0, max(1, EVAL_TOKENS // (windows_VT1.shape[1] - 1))
    with precision(windows_VT1.device):
        for ids in windows_VT1.split(rows):
            total += next_token_loss(model, ids[:, :-1], ids[:, 1:]).double().item() * len(ids)
    return total / len(windows_VT1)
