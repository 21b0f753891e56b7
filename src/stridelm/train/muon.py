"""Muon: momentum whose update is orthogonalised, for the matrices inside the blocks.

After Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon/, whose quintic Newton-Schulz coefficients and Nesterov form are
used here. Fused projections are several matrices in one parameter; each is orthogonalised separately.
Matrices of the same shape go through the iteration as one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(x_PMN: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Push every singular value of P matrices (M <= N) towards 1; after five iterations they are in about 0.7..1.2.

    Computed and returned in `dtype`; bfloat16 is enough.
    """
    assert x_PMN.shape[-2] <= x_PMN.shape[-1]
    a, b, c = NEWTON_SCHULZ
    x = x_PMN.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` of parameter number `index`: one of the matrices fused in it."""

    index: int
    start: int
    stop: int
    wide: bool

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        part = tensors[self.index][self.start : self.stop]
        return part if self.wide else part.mT

    def scale(self, tensors: Sequence[torch.Tensor]) -> float:
        """Larger for matrices taller than wide, so that the update's size per output row does not depend on the
        shape."""
        return math.sqrt(max(1.0, (self.stop - self.start) / tensors[self.index].shape[1]))


class Muon(torch.optim.Optimizer):
    """Muon over `matrices`, each with the row counts of the matrices fused in it.

    momentum: of the gradient's running mean. weight_decay: decoupled, times the learning rate.
    """

    def __init__(
        self,
        matrices: Sequence[tuple[torch.nn.Parameter, Sequence[int]]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        params = [parameter for parameter, _ in matrices]
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.batches = _batches(matrices)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        params: list[torch.Tensor] = group["params"]
        grads = [p.grad for p in params if p.grad is not None]
        assert len(grads) == len(params), "a matrix has no gradient"
        velocities = [self._velocity(p) for p in params]
        torch._foreach_lerp_(velocities, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, velocities, group["momentum"])  # Nesterov: look one step ahead
        dtype = torch.bfloat16 if params[0].is_cuda else torch.float32
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        for parts in self.batches:
            square = orthogonalise(torch.stack([part.read(updates) for part in parts]), dtype)
            for part, matrix in zip(parts, square.float().unbind(0), strict=True):
                part.read(params).add_(matrix, alpha=-group["lr"] * part.scale(params))

    def _velocity(self, parameter: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = self.state[parameter]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(parameter)
        return state["velocity"]


def _batches(matrices: Sequence[tuple[torch.nn.Parameter, Sequence[int]]]) -> list[list[Part]]:
    """All parts, grouped by their shape after tall ones are transposed."""
    groups: dict[tuple[int, int], list[Part]] = {}
    for index, (parameter, rows) in enumerate(matrices):
        height, width = parameter.shape
        if sum(rows) != height:
            raise ValueError(f"parts of {list(rows)} rows do not make up a matrix of {height} rows")
        start = 0
        for count in rows:
            part = Part(index, start, start + count, wide=count <= width)
            groups.setdefault((min(count, width), max(count, width)), []).append(part)
            start += count
    return list(groups.values())
