"""KV in eight bits: what the option changes, what is said of it, and what is refused before any weight is read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stridelm import LLM
from stridelm.builtin import builtin_path
from stridelm.cache.layout import UNSCALED, HeadsKV
from stridelm.config import EngineConfig
from stridelm.engine import kv_dtype
from stridelm.engine.load import describe_target
from stridelm.engine.memory import MemoryProfile, profile_memory
from stridelm.models.kv_scales import is_kv_scale, read_kv_scales
from stridelm.models.layers.decoder import Decoder
from stridelm.models.loader import build_empty, load_config
from support.checks.eight_bit_kv import FORMS, OPTION, SCALES, write_scaled
from support.doubles.stand import Stand

Checkpoint = Callable[..., Path]
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
E4M3 = torch.float8_e4m3fn


def empty(path: Path) -> Decoder:
    return build_empty(load_config(path), path)


def scales(llm: LLM) -> list[tuple[float, float]]:
    """Of each layer's keys and values."""
    states = llm.engine.loaded.pool.states
    assert all(isinstance(state, HeadsKV) for state in states)
    return [(state.key_scale, state.value_scale) for state in states if isinstance(state, HeadsKV)]


# What it changes


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_pools(checkpoint: Checkpoint, dtype: str) -> None:
    """The target's entries and those of every drafter with KV take a byte a number; nothing else has another dtype."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), dtype, options=OPTION)
    engine = stand.llm().engine
    assert {tensor.dtype for tensor in engine.loaded.pool.tensors} == {E4M3}
    assert engine.loaded.pool.dtype == getattr(torch, dtype)
    with_kv: list[Any] = [engine.drafters.get(name) for name in ("mtp", "eagle", "model")]
    pools = [drafter._runner.pool for drafter in with_kv]
    assert {tensor.dtype for pool in pools for tensor in pool.tensors} == {E4M3}


def test_memory() -> None:
    """A plan of a device's memory counts a byte a number, of drafting heads too: half of bfloat16's pages' size."""
    path = builtin_path()

    def profile(**options: Any) -> MemoryProfile:
        config = EngineConfig(model=str(path), drafter="mtp", **options)
        target = describe_target(config, load_config(path), path, GPU)
        return profile_memory(config, target, empty(path), torch.bfloat16, 2**34, "mtp", captures=False)

    usual, eight = profile(), profile(**OPTION)
    assert eight.page_bytes * 2 == usual.page_bytes and eight.parts == usual.parts
    fixed = profile(num_pages=2**22)
    assert "set kv_cache_dtype='fp8'" in fixed.remedies and "set kv_cache_dtype='fp8'" not in usual.remedies
    assert "set kv_cache_dtype='fp8'" not in profile(num_pages=2**22, **OPTION).remedies


def test_more_pages_fit(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same memory holds twice the pages of bfloat16."""
    from stridelm.engine import load

    monkeypatch.setattr(load, "free_memory", lambda device: 8 << 20)
    path = str(checkpoint("qwen3"))
    pages = [
        LLM(
            path,
            device="cpu",
            dtype="bfloat16",
            drafter="none",
            skip_tokenizer_init=True,
            kv_memory_fraction=0.02,
            kv_cache_dtype=kv,
        ).engine.loaded.pages["full"]
        for kv in ("auto", "fp8")
    ]
    assert 0 <= pages[1] - 2 * pages[0] <= 1


def test_log(checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says which scales are used, and that a CPU is slower."""
    path = checkpoint("qwen3", tie_word_embeddings=True)
    with caplog.at_level(logging.INFO):
        Stand(path, "float32", options=OPTION).llm()
        Stand(write_scaled(tmp_path / "scaled", path, "modelopt", 1), "float32", options=OPTION).llm()
        said = [record.getMessage() for record in caplog.records if record.name == kv_dtype.__name__]
    assert said[0].startswith("kv_cache_dtype fp8: all scales are 1; on a CPU such KV is read by torch, more slowly")
    assert said[1].startswith("kv_cache_dtype fp8: scales of 1 of 2 layers from the checkpoint; on a CPU")


# The scales of a checkpoint


@pytest.mark.parametrize("form", FORMS)
def test_scales(checkpoint: Checkpoint, tmp_path: Path, form: str) -> None:
    """Whatever they are called, and whether they have a dimension or not; without the option they are left alone."""
    source = checkpoint("qwen3", tie_word_embeddings=True)
    path = write_scaled(tmp_path / "scaled", source, form, 2)
    first = (SCALES["v"],) * 2 if form == "one for both" else tuple(SCALES.values())
    wanted = {0: pytest.approx(first), 1: pytest.approx(tuple(scale / 2 for scale in first))}
    assert read_kv_scales(path, empty(path)) == wanted and read_kv_scales(source, empty(source)) == {}
    assert scales(Stand(path, "float32", options=OPTION).llm()) == [wanted[0], wanted[1]]
    for stand in (Stand(path, "float32"), Stand(source, "float32", options=OPTION)):
        assert scales(stand.llm()) == [UNSCALED] * 2


def test_names() -> None:
    """Scales of weights, of rows and of other modules are not taken for those of KV."""
    layer = "model.layers.3.self_attn."
    for name in ("k_scale", "attn.v_scale", "mla_attn.k_scale", "k_proj.k_scale", "v_proj.v_scale", "kv_scale"):
        assert is_kv_scale(layer + name) and is_kv_scale(f"model.language_model.layers.3.self_attn.{name}")
    for name in ("k_proj.weight_scale", "k_proj.input_scale", "q_scale", "k_norm.weight", "k_scales"):
        assert not is_kv_scale(layer + name)
    assert not is_kv_scale("model.layers.3.mlp.k_scale")


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor(0.0), "k_scale is 0.0, and not a positive number"),
        (torch.tensor(float("nan")), "k_scale is nan, and not a positive number"),
        (torch.ones(2), "k_scale has 2 numbers; KV is stored with one scale for the keys"),
    ],
    ids=["zero", "nan", "by head"],
)
def test_scales_that_cannot_be_used(checkpoint: Checkpoint, tmp_path: Path, scale: torch.Tensor, message: str) -> None:
    path = write_scaled(tmp_path / "scaled", checkpoint("qwen3"), "compressed-tensors", 1)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = scale
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{message}.*leave kv_cache_dtype at 'auto'"):
        Stand(path, "float32", options=OPTION).llm()


# What is refused


def test_values() -> None:
    assert EngineConfig(kv_cache_dtype="fp8_e4m3") == EngineConfig(kv_cache_dtype="fp8")
    assert next(field for field in fields(EngineConfig) if field.name == "kv_cache_dtype").default == "auto"
    for wrong in ("fp8_e5m2", "int8", "", None):
        with pytest.raises(ValueError, match=r"unknown kv_cache_dtype .*; choose auto or fp8"):
            EngineConfig(kv_cache_dtype=wrong)  # type: ignore[arg-type]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that have no such numbers are refused."""
    for capability, able in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        kv_dtype.check_device(CPU)
        if able:
            kv_dtype.check_device(GPU)
        else:
            with pytest.raises(ValueError, match=r"capability 8.9 or later; leave it at 'auto', or choose another"):
                kv_dtype.check_device(GPU)
