"""Checkpoints that cannot be served are refused by what their config.json says, before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stridelm.models import MODELS
from stridelm.models.loader import load_model, resolve_dtype
from support.checkpoints.models import make

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
UNREAD = {
    "deepseek_v3": ("head_dim", "pretraining_tp", "qk_head_dim"),
    "gemma4_text": ("num_hidden_layers", "vocab_size_per_layer_input"),
    "kimi_k2": ("head_dim", "pretraining_tp", "qk_head_dim"),
    "llama": ("pretraining_tp",),
    **dict.fromkeys(("mimo", "qwen2", "qwen3"), ("max_window_layers",)),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), ("max_window_layers", "sliding_window")),
}
"""Fields that no computation here depends on, in these configs."""
SHOWN_AS = {"hidden_size": "hidden", "num_local_experts": "num_experts"}
"""Part of what errors call them, where that is not the field's name."""
ROPE: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Writes a model's config.json with changes, and no weights."""

    def write(kind: str, **changes: Any) -> Path:
        make(kind).config.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return tmp_path

    return write


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (callers look at the text)
        load_model(path)
    assert type(caught.value) is ValueError
    return str(caught.value)


@pytest.mark.parametrize("kind", list(MODELS))
def test_no_number_may_be_negative(written: Written, kind: str) -> None:
    """Whichever it is, the error has the field's name."""
    config = json.loads((written(kind) / "config.json").read_text())
    counts = [name for name, value in config.items() if type(value) is int and name not in TOKENS]
    read = [name for name in counts if name not in UNREAD.get(kind, ())]
    assert len(read) >= 7
    assert [name for name in read if SHOWN_AS.get(name, name) not in refused(written(kind, **{name: -1}))] == []


@pytest.mark.parametrize("value", [-1.0, 0, None, "x", float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["rope_theta", "factor", "mscale"])
def test_numbers_of_rotations(written: Written, name: str, value: Any) -> None:
    """None means that a field is not there; YaRN's factor then follows from the lengths."""
    absent = {"mscale": (None, 0), "factor": (None,)}
    text = refused(written("glm4_moe", rope_parameters={**ROPE, name: value}))
    assert ("no *.safetensors" if value in absent.get(name, ()) else name) in text


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"sliding_window": 0}),
        ("llama", {"rms_norm_eps": -1e-6}),
        ("glm4_moe", {"routed_scaling_factor": -2.5}),
        ("glm4_moe", {"num_key_value_heads": 0}),
        ("glm4_moe", {"n_group": 0}),
        ("deepseek_v3", {"first_k_dense_replace": None}),
        ("deepseek_v3", {"num_experts_per_tok": None}),
        ("deepseek_v3", {"v_head_dim": None}),
        ("qwen3_moe", {"num_experts_per_tok": 0}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}),
    ],
)
def test_senseless_numbers(written: Written, kind: str, changes: dict[str, Any]) -> None:
    assert next(iter(changes)) in refused(written(kind, **changes))


@pytest.mark.parametrize(
    ("stated", "shown"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq (bits 4)"),
        ({"quant_method": "gptq", "bits": 8}, "gptq (bits 8)"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt (quant_algo NVFP4)"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, "bitsandbytes (bnb_4bit_quant_type nf4)"),
        ({"bits": 4}, "a method without a name (bits 4)"),
        ("awq", "a method without a name"),
    ],
)
def test_quantised_weights(written: Written, stated: Any, shown: str) -> None:
    """The format has a name in the error, and the remedy is there, under either of the fields."""
    for field in ("quantization_config", "compression_config"):
        text = refused(written("qwen3", **{field: stated}))
        assert f"quantised by {shown}" in text
        assert "give the checkpoint that they were quantised from" in text


def test_a_format_that_is_read_has_one_field(written: Written) -> None:
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    assert "quantised by compressed-tensors (format float-quantized)" in refused(
        written("qwen3", compression_config=stated)
    )


def test_a_format_that_is_stated_beside_config(written: Written) -> None:
    """ModelOpt's older checkpoints do so."""
    path = written("llama")
    beside = path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}))
    assert "quantised by modelopt (quant_algo FP8)" in refused(path)
    beside.write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert "no *.safetensors" in refused(path)
    beside.write_text("[")
    assert "hf_quant_config.json cannot be read" in refused(path)


@pytest.mark.parametrize("kind", ["crystal", "deepseek_v2", None, 5])
def test_code_of_a_checkpoint_is_not_run(written: Written, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked whether it should be, and the error says what can be served."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asked"))
    path = written("llama", model_type=kind, auto_map={"AutoConfig": "configuration_crystal.CrystalConfig"})
    (path / "configuration_crystal.py").write_text("raise SystemExit('run')")
    text = refused(path)
    assert f"unknown model type {kind!r}; choose one of: deepseek_v3, " in text
    assert "auto_map names is not run" in text


def test_code_beside_a_known_type_is_not_run(written: Written) -> None:
    path = written("llama", auto_map={"AutoConfig": "configuration_crystal.CrystalConfig"})
    (path / "configuration_crystal.py").write_text("raise SystemExit('run')")
    assert "no *.safetensors" in refused(path)


def test_a_gpu_does_not_compute_in_float64() -> None:
    """Its kernels compute in float32."""
    card, stored = torch.device("cuda"), SimpleNamespace(dtype=torch.float64)
    with pytest.raises(ValueError, match="dtype float64 is for a CPU; choose float32, or device cpu"):
        resolve_dtype("float64", stored, card)
    assert resolve_dtype("auto", stored, card) == torch.float32
    assert resolve_dtype("float64", stored, torch.device("cpu")) == torch.float64
