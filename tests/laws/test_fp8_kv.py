"""The laws of identity hold for KV in eight bits: whatever is drafted, shared, cut or preempted, the output is plain
decoding's with the same option, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.checks.eight_bit_kv import OPTION, check_batches, check_effect, write_scaled
from support.checks.identity import TEMPERATURES
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "deepseek_v3": {},
    "gemma4_text": {},
}
"""Keys and values, latent rows, and layers with windows that share entries."""


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", MODELS)
def test_identity(checkpoint: Callable[..., Path], model: str, dtype: str) -> None:
    """Requests with different drafters and trees in one batch, over cached prefixes, and after preemptions."""
    stand = Stand(checkpoint(model, **MODELS[model]), dtype, options=OPTION)
    check_batches(stand, random.Random(f"{model} {dtype}").choice(TEMPERATURES))
    check_effect(stand)


def test_scales(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """With the scales of a checkpoint, which differ from layer to layer; the last has none."""
    path = checkpoint("qwen3", tie_word_embeddings=True)
    stand = Stand(write_scaled(tmp_path / "scaled", path, "compressed-tensors", 1), "float32", options=OPTION)
    check_batches(stand, 0.7)
    check_effect(stand)
