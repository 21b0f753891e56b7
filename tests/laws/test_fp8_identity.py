"""The laws of identity hold for models in eight bits: whatever is drafted and whatever shares the batch, the output is
plain decoding's, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stridelm.models import MODELS as ARCHITECTURES
from support.checkpoints.fp8 import write_fp8
from support.checks.identity import TEMPERATURES, check_crowd, check_identity, mixed_jobs
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered

MODELS: dict[str, dict[str, Any]] = {
    **{kind: {"hidden_size": 136} for kind in ARCHITECTURES},
    "qwen3": {"hidden_size": 136, "intermediate_size": 200, "tie_word_embeddings": True},
    "qwen3_moe": {"hidden_size": 136, "num_experts": 8},
}
"""Of widths that end within a block."""
CASES = [(model, form) for model in MODELS for form in ("block", "channel", "while loading")]
CASES += [("deepseek_v3", "powers"), ("qwen3_moe", "powers")]  # summed like "block"


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize(("model", "form"), CASES)
def test_identity(checkpoint: Callable[..., Path], tmp_path: Path, model: str, form: str) -> None:
    """Requests with different drafters in one batch emit what they emit alone, and so they do after preemptions, which
    know nothing of the form."""
    temperature = random.Random(f"{model} {form}").choice(TEMPERATURES)
    path, options = checkpoint(model, **MODELS[model]), {}
    if form == "while loading":
        options = {"quantization": "fp8"}
    else:
        path = write_fp8(tmp_path / "stored", path, form)
    stand = Stand(path, "bfloat16" if temperature else "float32", options=options)
    check_identity(stand, mixed_jobs(stand, 8, temperature, ["nothing"], seed=3), max_num_batched_tokens=33)
    if form == "block":
        check_crowd(stand, temperature, ["nothing"])
