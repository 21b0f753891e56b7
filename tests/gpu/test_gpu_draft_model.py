"""A draft model on a GPU, captured and not: with the target's own weights its drafts are accepted to the last token."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stridelm import SamplingParams
from support.checks.watch import engine, prompts
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_target_s_own_weights(
    checkpoint: Callable[..., Path], tmp_path: Path, page_size: int, enforce_eager: bool
) -> None:
    """Five requests, so that a captured step is padded, which end at different lengths, so that it drafts beyond the
    room of some; again after prefix hits, and with sampling."""
    target = checkpoint("qwen3", tie_word_embeddings=True)
    twin = shutil.copytree(target, tmp_path / "twin")
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "enforce_eager": enforce_eager}
    llm = engine(target, drafter="model", drafter_model=str(twin), depth=5, page_size=page_size, **options)
    jobs = prompts(5)
    for temperature in (0.0, 1.0):
        params = [
            SamplingParams(temperature=temperature, max_tokens=20 + 7 * i, seed=i, ignore_eos=True) for i in range(5)
        ]
        outputs = llm.generate(jobs, params)
        for output in outputs:
            assert output.metrics is not None
            assert output.metrics.accepted == output.metrics.drafted >= 12
        jobs = [job + output.outputs[0].token_ids for job, output in zip(jobs, outputs)]
    llm.check()
