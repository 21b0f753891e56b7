"""A start is rehearsed without a device: it finds the kernels, compiles them for the device, and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stridelm
from support.checkpoints.assistants import write_assistant
from support.checkpoints.fp8 import FORMS, write_fp8
from support.checkpoints.heads import write_eagle
from support.doubles.forks import forks
from support.oracles.models import VARIANTS

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_gpu_start.py starts on the GPU itself"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to pretend that there is a GPU"),
]
BASE = {"device": "cuda:0", "dtype": "bfloat16", "num_pages": 256, "max_num_seqs": 4, "max_num_batched_tokens": 128}


Rehearse = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def rehearse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearse]:
    """rehearse(directory, config, compiled=0): what support/doubles/absent_gpu.py prints. directory: where kernels are
    kept."""
    from support.doubles.absent_gpu import compile_guard  # where triton is installed

    guard = compile_guard(tmp_path_factory.mktemp("guard"))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(stridelm.__path__[0]).parent)
    imported = ["torch._dynamo", "torch.utils.cpp_extension", "transformers.generation", "transformers.models.auto"]
    imported += ["stridelm.engine.start", "stridelm.engine.rehearsal", "stridelm.kernels.triton_step"]
    with forks(imported, environment) as programs:

        def rehearse(directory: Path, config: dict[str, Any], compiled: int = 0) -> dict[str, int]:
            arguments = json.dumps(BASE | config), str(guard), str(compiled)
            cache = {"TRITON_CACHE_DIR": str(directory / "kernels")}
            run = programs.run("support.doubles.absent_gpu", *arguments, environment=cache)
            assert run.returncode == 0, run.stderr[-3000:]
            assert "could not be compiled ahead" not in run.stderr, run.stderr[-3000:]
            found: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
            return found

        yield rehearse


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "none"},
        {"drafter": "none", "deterministic": True},
        {"drafter": "ngram", "acceptance": "rejection"},
        {"drafter": "suffix"},
        {"drafter": "none", "quantization": "fp8"},
        {"drafter": "eagle", "depth": 3},
        {"drafter": "hybrid", "depth": 4},
        {"drafter": "eagle", "depth": 3, "kv_cache_dtype": "fp8"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_start_is_rehearsed(
    checkpoint: Callable[..., Path], rehearse: Rehearse, tmp_path: Path, options: dict[str, Any]
) -> None:
    """With any drafter and rule. No cache of the process may keep a tensor without memory: an engine that starts later
    would compute with it."""
    target = checkpoint("qwen3", tie_word_embeddings=True)
    head = {}
    if options["drafter"] in ("eagle", "hybrid"):
        head = {"drafter_model": str(write_eagle(tmp_path / "head", target, "eagle3"))}
    found = rehearse(tmp_path, {"model": str(target), **options, **head})
    assert found["launched"] > 25
    assert found["left"] == 0


@pytest.mark.parametrize(("kind", "quantization"), [("qwen2_moe", None), ("qwen3_moe", None), ("qwen3_moe", "fp8")])
def test_a_mixture_is_rehearsed(
    checkpoint: Callable[..., Path], rehearse: Rehearse, tmp_path: Path, kind: str, quantization: str | None
) -> None:
    """Which experts are chosen is not known, and nothing asks."""
    options = {"drafter": "none", "deterministic": True, "quantization": quantization}
    found = rehearse(tmp_path, {"model": str(checkpoint(kind)), **options})
    assert found["launched"] > 25
    assert found["left"] == 0


def test_expanded_latents_are_rehearsed(checkpoint: Callable[..., Path], rehearse: Rehearse, tmp_path: Path) -> None:
    """Long chunks launch kernels of their own, in models whose keys are as wide as their values."""
    launched = []
    for width in (12, 16):
        path = checkpoint("deepseek_v3", v_head_dim=width, max_position_embeddings=2048)
        found = rehearse(tmp_path, {"model": str(path), "drafter": "none", "max_num_batched_tokens": 1024})
        assert found["left"] == 0
        launched.append(found["launched"])
    assert launched[0] < launched[1]


@pytest.mark.parametrize("rows", [128, 1024])
def test_layers_that_share_are_rehearsed(
    checkpoint: Callable[..., Path], rehearse: Rehearse, tmp_path: Path, rows: int
) -> None:
    """With an assistant, and in steps of so many rows that those which decide nothing stop early."""
    target = checkpoint("gemma4_text", **VARIANTS["gemma4_text"]["shared-with-inputs"])
    head = write_assistant(tmp_path / "head", target)
    options = {"drafter": "frozen_kv", "drafter_model": str(head), "max_num_batched_tokens": rows}
    found = rehearse(tmp_path, {"model": str(target), **options})
    assert found["launched"] > 25
    assert found["left"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_checkpoint_is_rehearsed(
    checkpoint: Callable[..., Path], rehearse: Rehearse, tmp_path: Path, form: str
) -> None:
    """Its headers say which matrices are in eight bits, although no weights are read."""
    path = write_fp8(tmp_path / "stored", checkpoint("deepseek_v3"), form)
    found = rehearse(tmp_path, {"model": str(path), "drafter": "none"})
    assert found["launched"] > 25
    assert found["left"] == 0


def test_layers_of_several_formats_are_rehearsed(
    checkpoint: Callable[..., Path], rehearse: Rehearse, tmp_path: Path
) -> None:
    """A layer in another format than an earlier one of the same shape launches kernels of its own, whichever of them
    is the first."""
    launched = {}
    for left in (0, 1, None):
        prefix = f"model.layers.{left}."
        path = write_fp8(
            tmp_path / str(left),
            checkpoint("qwen3"),
            "block",
            leaves=lambda name, prefix=prefix: name.startswith(prefix),  # type: ignore[misc]
        )
        launched[left] = rehearse(tmp_path, {"model": str(path), "drafter": "none"})["launched"]
    assert launched[0] == launched[1] > launched[None]


def test_kernels_are_compiled_and_kept(checkpoint: Callable[..., Path], rehearse: Rehearse, tmp_path: Path) -> None:
    """For the device, on other threads; in a second process there is nothing left to compile."""
    config = {"model": str(checkpoint("qwen3", tie_word_embeddings=True)), "drafter": "none"}
    assert rehearse(tmp_path, config, compiled=6)["compiled"] == 6
    assert len(list((tmp_path / "kernels").glob("*/*.cubin"))) == 6
    assert rehearse(tmp_path, config, compiled=6)["compiled"] == 0


def test_what_cannot_start_compiles_nothing(rehearse: Rehearse, tmp_path: Path) -> None:
    """The start itself says why."""
    assert rehearse(tmp_path, {"model": str(tmp_path / "nothing")}) == {"launched": 0, "compiled": 0, "left": 0}
