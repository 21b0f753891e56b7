"""On a machine without kernels nearly all are compiled ahead, and the engine is the same as if none had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stridelm
from support.checkpoints.heads import write_eagle
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
SMALL = {"skip_tokenizer_init": True, "num_pages": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256}


def start(config: dict[str, Any], kernels: Path, *arguments: str) -> dict[str, Any]:
    """What support/doubles/started.py prints of a start with these kernels."""
    command = [sys.executable, "-m", "support.doubles.started", json.dumps({**SMALL, **config}), *arguments]
    package = str(Path(stridelm.__path__[0]).parent)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(kernels), "PYTHONPATH": package}
    run = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "could not be compiled ahead" not in run.stderr, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("drafter", ["none", "eagle"])
def test_missing_kernels_are_compiled_ahead(checkpoint: Callable[..., Path], tmp_path: Path, drafter: str) -> None:
    target = checkpoint("qwen3", tie_word_embeddings=True)
    config: dict[str, Any] = {"model": str(target), "dtype": "bfloat16", "device": "cuda", "drafter": drafter}
    if drafter != "none":
        config |= {"drafter_model": str(write_eagle(tmp_path / "head", target, "eagle3")), "depth": 3}
    bare = start(config, tmp_path / "kernels")
    assert bare["all"] >= bare["ahead"] >= 0.9 * bare["all"] > 0
    assert bare["left"] == 0, "tensors without memory"
    again = start(config, tmp_path / "kernels")
    assert (again["ahead"], again["all"]) == (None, 0), "everything is found on disk, and nothing is looked for"
    serial = start(config, tmp_path / "others", "--one-by-one")
    assert serial["ahead"] is None and serial["all"] > 0
    assert bare["tokens"] == again["tokens"] == serial["tokens"]
