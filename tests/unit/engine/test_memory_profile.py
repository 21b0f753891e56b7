"""Before any weight is read, an engine says what will be taken of memory and what is left for KV, and it is right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.builtin import builtin_path
from stridelm.config import EngineConfig
from stridelm.engine import load as loading
from stridelm.engine.load import describe_target, load
from stridelm.engine.memory import MemoryProfile, profile_memory
from stridelm.models import MODELS, loader
from stridelm.models.loader import build_stored, load_config, load_model

Checkpoint = Callable[..., Path]
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
GIB = 2**30


def profile(
    path: Path, device: torch.device = CPU, free: int = GIB, drafter: str = "none", **options: Any
) -> MemoryProfile:
    """Of an engine in float32."""
    config, hf_config = EngineConfig(model=str(path), **options), load_config(path)
    model, _ = build_stored(hf_config, path, quantization=config.quantization)
    target = describe_target(config, hf_config, path, device)
    return profile_memory(config, target, model, torch.float32, free, drafter, captures=device.type == "cuda")


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("model_type", list(MODELS))
def test_the_parts_are_those_of_the_loaded_model(
    model_type: str, quantization: str | None, checkpoint: Checkpoint
) -> None:
    """Weights, scales and rotary tables, to the byte."""
    path = checkpoint(model_type)
    parts = dict(profile(path, quantization=quantization).parts)
    model = load_model(path, quantization=quantization, serving=False)
    assert parts.pop("rotary tables") == sum(buffer.nbytes for buffer in model.buffers())
    held = dict(model.named_parameters())
    scales = sum(tensor.nbytes for name, tensor in held.items() if name.endswith("_scale"))
    experts = sum(tensor.nbytes for name, tensor in held.items() if ".experts." in name and "_scale" not in name)
    assert (parts.get("scales", 0), parts.get("experts", 0)) == (scales, experts)
    assert (scales > 0) == (quantization is not None)
    assert sum(parts.values()) == sum(tensor.nbytes for tensor in held.values())


def test_heads_graphs_and_logits_count_too() -> None:
    """A head that the engine starts with; on a GPU, what captured steps may take, and the logits of a step."""
    plain, drafting = (profile(builtin_path(), drafter=drafter).parts for drafter in ("none", "mtp"))
    assert drafting.items() - plain.items() == {("drafting heads", drafting["drafting heads"])}
    on_gpu = profile(builtin_path(), GPU, 8 * GIB, capture_memory=0.5, max_num_batched_tokens=512).parts
    assert on_gpu["captured steps"] == GIB // 2
    assert on_gpu["logits"] == 512 * 4096 * (4 + 4)
    assert on_gpu.items() > plain.items()
    assert "captured steps" not in profile(builtin_path(), GPU, 8 * GIB, enforce_eager=True).parts


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("share", [0.05, 0.2, 1.0])
def test_the_engine_has_the_kv_that_was_told(
    share: float, window: int | None, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many pages, and as many contexts as these hold: all that are of use, or what fits."""
    path = checkpoint("mistral", sliding_window=window)
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    plenty = profile(path, **options)
    assert plenty.contexts == 8
    free = plenty.taken + int(plenty.kv * share / 0.25) + 1
    told = profile(path, free=free, **options)
    assert 0.9 * share <= told.kv / plenty.kv <= share
    assert told.contexts == int(8 * share) if window is None else told.contexts <= plenty.contexts
    seen = iter((free, free - told.taken))
    monkeypatch.setattr(loading, "free_memory", lambda device: next(seen))
    pool = load(
        EngineConfig(
            model=str(path), drafter="none", device="cpu", dtype="float32", skip_tokenizer_init=True, **options
        )
    ).pool
    assert told.kv == sum(tensor.nbytes * pages // (pages + 1) for tensor, pages in zip(pool.tensors, pages_of(pool)))


def pages_of(pool: Any) -> list[int]:
    return [pool.pages[state.group] for state in pool.states for _ in state.tensors()]


def test_it_is_told_and_refused_before_a_weight_is_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the parts, what is missing, and what would help. A byte more, and the engine loads."""
    path = checkpoint("qwen3_moe")
    config = EngineConfig(
        model=str(path), drafter="none", device="cpu", dtype="float32", kv_memory_fraction=0.5, skip_tokenizer_init=True
    )
    caplog.set_level(logging.INFO, "stridelm.engine.memory")
    told = profile(path, kv_memory_fraction=0.5)
    enough = told.taken + 2 * told.page_bytes
    with monkeypatch.context() as patched:
        patched.setattr(loading, "free_memory", lambda device: enough - 1)
        patched.setattr(loader, "materialise", lambda *args: pytest.fail("memory was allocated"))
        with pytest.raises(ValueError, match=r"experts .* 1 B are missing; choose a narrower dtype, set quantization"):
            load(config)
        assert "experts" in caplog.text and "KV 0 B, 0 contexts of 256 tokens" in caplog.text
        with pytest.raises(ValueError, match=r"are missing; .*lower num_pages"):
            load(replace(config, kv_memory_fraction=None, num_pages=3))
    monkeypatch.setattr(loading, "free_memory", lambda device: enough)
    assert load(config).pages["full"] >= 1
