"""Checks of matrix products whose rows must not depend on how many rows run beside them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

Run = Callable[[torch.Tensor], torch.Tensor]


def weights(seed: int, width: int, out: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight [out, width], bias [out])."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=generator) * width**-0.5
    return weight.to(dtype).to(device), torch.randn(out, generator=generator).to(dtype).to(device)


def rows(seed: int, count: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed + 1)).to(dtype).to(device)


def check_row_bits(run: Run, x_NI: torch.Tensor, seed: int = 0, counts: tuple[int, ...] = ()) -> None:
    """Each row's result has the same bits for any subset of rows: all, the first n, a random few."""
    rng = random.Random(seed)
    everything = run(x_NI)
    total = x_NI.shape[0]
    for count in counts or range(1, total + 1):
        for chosen in (list(range(count)), sorted(rng.sample(range(total), count))):
            index = torch.tensor(chosen, device=x_NI.device)
            assert torch.equal(run(x_NI[index]), everything[index]), (count, chosen[:4])


def check_close(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The result is close to the exact product."""
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[x.dtype]
    assert float((got.double() - wanted).abs().max()) <= close
