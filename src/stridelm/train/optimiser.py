"""Assigns each parameter to an optimiser, and steps all of them together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from stridelm.train.muon import Muon
from stridelm.train.objective import Trainable
from stridelm.train.settings import OptimSettings

OF_TOKENS = ("embed.weight", "embedding.weight", "head.weight")
"""Names, in decoders and heads, of matrices with one row per token."""


class Optimiser:
    """Muon for inner matrices, AdamW for the rest; `step(factor)` scales both peak learning rates."""

    def __init__(self, model: Trainable, settings: OptimSettings) -> None:
        self.settings = settings
        fused = dict(matrices(model))
        by_name = dict(model.named_parameters())
        rest = [(name, p) for name, p in by_name.items() if name not in fused]
        decayed = [p for _, p in rest if p.ndim > 1]
        plain = [p for _, p in rest if p.ndim == 1]
        self.parameters = list(by_name.values())
        on_cuda = self.parameters[0].is_cuda
        self.muon = Muon(
            [(by_name[name], rows) for name, rows in fused.items()],
            lr=settings.muon_lr,
            momentum=settings.momentum,
            weight_decay=settings.muon_decay,
        )
        self.adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.adam_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=settings.adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=on_cuda,
        )

    def step(self, factor: float) -> torch.Tensor:
        """Apply and clear the gradients. Returns their norm before clipping (a scalar tensor, not
        synchronised)."""
        limit = self.settings.clip or float("inf")
        norm = nn.utils.clip_grad_norm_(self.parameters, limit, foreach=True)
        for optimiser, peak in ((self.muon, self.settings.muon_lr), (self.adam, self.settings.adam_lr)):
            for group in optimiser.param_groups:
                group["lr"] = peak * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def matrices(model: Trainable) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of the inner matrices, each with the row counts of the matrices fused in it. Those with one row per token
    are excluded."""
    slots: dict[str, list[tuple[int, int]]] = {}
    for _, slot in model.slots():
        slots.setdefault(slot.name, []).append((slot.start, slot.stop))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and name not in OF_TOKENS:
            yield name, tuple(stop - start for start, stop in sorted(slots[name]))
