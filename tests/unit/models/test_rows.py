"""Norms, rotations and activations row by row: in the whole decoder a row's bits do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.attention.base import HeadsInput, LatentInput
from stridelm.kernels.ops import QKRope
from stridelm.kernels.plain import latent_rows, roped, rotate
from stridelm.models import MODELS
from stridelm.models.layers.decoder import ModelInput
from stridelm.models.layers.rope import Rope, RopeSpec
from stridelm.models.loader import load_model
from support.checks.linear import check_row_bits
from support.oracles.models import VARIANTS

MORE = [("gemma4_text", VARIANTS["gemma4_text"][name]) for name in ("shared-with-inputs", "experts")]
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in MODELS), *MORE])
def test_decoder_rows(checkpoint: Callable[..., Path], kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Without attention, a row of the model has the same bits among 1 to 64 rows."""
    model = load_model(checkpoint(kind, hidden_size=80, intermediate_size=168, **options), dtype=dtype)
    ids = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(0))
    positions = torch.randint(0, 200, (64,), generator=torch.Generator().manual_seed(1))

    def mix(layer: int, inputs: HeadsInput | LatentInput) -> torch.Tensor:
        if isinstance(inputs, LatentInput):
            q, row = latent_rows(inputs.turned_NHK, inputs.rows_NC, inputs.rope)
            q_NHR = inputs.expansion.absorb(inputs.q_NHD)
            return inputs.expansion.values(q_NHR + q.sum(2, keepdim=True) * row[:, None, : q_NHR.shape[2]])
        q, k, v = roped(inputs.qkv_NXD, inputs.rope)
        if not k.shape[1]:
            return q
        return q + (k * v).repeat_interleave(q.shape[1] // k.shape[1], 1)

    def run(rows: torch.Tensor) -> torch.Tensor:
        picked = rows[:, 0]
        return model.logits(model(ModelInput(ids[picked], positions[picked], mix)))

    with torch.inference_mode():
        check_row_bits(run, torch.arange(64)[:, None])


def test_rotation_is_relative() -> None:
    """Products of rotated vectors depend only on the difference of positions."""
    rope = Rope(RopeSpec(32, 10000.0), 200)
    rope.prepare("cpu")
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64)

    def score(at: int, to: int) -> float:
        roped = [rotate(x, QKRope(1, 0, torch.tensor([n]), rope.cos, rope.sin)) for x, n in ((q, at), (k, to))]
        return float((roped[0] * roped[1]).sum())

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-2)
