"""The interface between the training loop and objectives, and the pieces that objectives share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.models.layers.decoder import Decoder, ModelInput
from stridelm.models.layers.slots import Slots
from stridelm.train.dense import DenseMix, flat_positions

logger = logging.getLogger(__name__)

EVAL_TOKENS = 32_768
"""Tokens of a validation batch."""

T = TypeVar("T")


@dataclass(frozen=True)
class Validation:
    """score: what the best checkpoint minimises (infinite: do not keep this one). metrics: everything worth logging.
    shown: text displayed beside the losses until the next validation."""

    score: float
    metrics: dict[str, float]
    shown: str = ""


class Trainable(Protocol):
    """A module that declares which of its parameters hold several of a checkpoint's tensors."""

    def slots(self, theirs: str = "") -> Slots: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


class Objective(Protocol):
    """A loss over windows, and validation on a fixed set."""

    @property
    def model(self) -> Trainable:
        """The module being trained."""
        ...

    def loss(self, ids_BT1: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The scalar to minimise, and detached scalars to log, for windows [B, T + 1]."""
        ...

    def validate(self) -> Validation: ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs in addition to the weights."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


def precision(device: torch.device) -> torch.autocast:
    """bfloat16 products over float32 weights on CUDA; plain float32 elsewhere.

    Each weight is used once per pass, so autocast's cache of casts would only waste memory.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def compiled(function: Callable[..., T], wanted: bool) -> Callable[..., T]:
    """`torch.compile` for fixed shapes, if wanted. If compilation fails, the run continues uncompiled."""
    if not wanted:
        return function
    fast: Callable[..., T] | None = torch.compile(function, dynamic=False)

    def call(*args: Any) -> T:
        nonlocal fast
        if fast is None:
            return function(*args)
        try:
            return fast(*args)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # what compilers raise differs between versions
            logger.exception("torch.compile failed; training continues uncompiled, several times slower")
            fast = None
            return function(*args)

    return call


def plain_hidden(model: Decoder, ids_BT: torch.Tensor) -> torch.Tensor:
    """Causal forward over B sequences: [B * T, hidden]."""
    batch, length = ids_BT.shape
    return model(ModelInput(ids_BT.flatten(), flat_positions(batch, length, ids_BT.device), DenseMix(batch)))


def next_token_loss(model: Decoder, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token."""
    logits = model.logits(plain_hidden(model, inputs_BT))
    return F.cross_entropy(logits.float(), targets_BT.flatten())


@torch.no_grad()
def plain_validation_loss(model: Decoder, windows_VT1: torch.Tensor) -> float:
    """Mean next-token cross-entropy over fixed windows, in nats per token."""
    total, rows = 0.0, max(1, EVAL_TOKENS // (windows_VT1.shape[1] - 1))
    with precision(windows_VT1.device):
        for ids in windows_VT1.split(rows):
            total += next_token_loss(model, ids[:, :-1], ids[:, 1:]).double().item() * len(ids)
    return total / len(windows_VT1)
