"""Norms, rotations and activations row by row: the whole decoder keeps a row's bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stridelm.models import MODELS
from stridelm.models.layers.norm import RMSNorm
from stridelm.models.layers.rope import Rope, RopeSpec, rotate
from stridelm.models.loader import load_model
from support.linear import check_row_bits

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", list(MODELS))
def test_decoder_rows(checkpoint: Callable[..., Path], kind: str, dtype: torch.dtype) -> None:
    """With attention out of the way, a row of the model has the same bits among 1 to 64 rows."""
    model = load_model(checkpoint(kind, hidden_size=80, intermediate_size=168), dtype=dtype)
    ids = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(0))
    positions = torch.randint(0, 200, (64,), generator=torch.Generator().manual_seed(1))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + (k * v).repeat_interleave(q.shape[1] // k.shape[1], 1)

    def run(rows: torch.Tensor) -> torch.Tensor:
        picked = rows[:, 0]
        return model.logits(model(ids[picked], positions[picked], attend))

    with torch.inference_mode():
        check_row_bits(run, torch.arange(64)[:, None])


@pytest.mark.parametrize("width", [1, 16, 63, 384])
def test_norm(width: int) -> None:
    """y = x / sqrt(mean(x^2) + eps) * weight, a row at a time."""
    norm = RMSNorm(width, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(40, width)
    wanted = x / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    assert torch.allclose(norm(x).double(), wanted, atol=1e-5)
    for dtype in DTYPES:
        check_row_bits(norm.to(dtype), x.to(dtype))


def test_rotation_is_relative() -> None:
    """Products of rotated vectors depend on the difference of positions alone."""
    rope = Rope(RopeSpec(32, 10000.0))
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64)

    def score(at: int, to: int) -> float:
        turned = [rotate(x, *rope(torch.tensor([n]), torch.float64)) for x, n in ((q, at), (k, to))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-2)
