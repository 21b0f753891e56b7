"""Checkpoints with modules that predict further tokens, and the config that transformers lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from stridelm.models.layers.hf import EXTRA_MODULES, common_fields
from stridelm.models.loader import load_model
from support.checkpoints.heads import MtpForm, write_mtp
from support.checkpoints.models import write

LAZY = """
import sys
import stridelm.models
from stridelm.models.loader import build_empty, load_config
assert "transformers" not in sys.modules
config = load_config(sys.argv[1])
spec = build_empty(config, sys.argv[1]).spec
mixers = [layer.mixer for layer in spec.layers]
print(type(config).__name__, spec.extra_modules, *((m.qkv_bias, m.window, m.rope.theta) for m in mixers))
"""


def test_a_config_that_transformers_lacks(tmp_path: Path) -> None:
    """A released MiMo's config.json is read without running the code it names; nothing is imported before."""
    released = {
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 32768,
        "max_window_layers": 36,
        "model_type": "mimo",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 640000,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(released))
    run = subprocess.run([sys.executable, "-c", LAZY, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split("\n")[-2] == "MiMoConfig 1" + " (True, None, 640000.0)" * 2


@pytest.mark.parametrize("field", EXTRA_MODULES)
def test_how_configs_declare_modules(field: str) -> None:
    for said, meant in ((None, 0), (0, 0), (3, 3)):
        assert common_fields(LlamaConfig(**{field: said}))["extra_modules"] == meant
    assert common_fields(LlamaConfig())["extra_modules"] == 0


@pytest.mark.parametrize(
    ("form", "name"),
    [("deepseek", "model.layers.2.eh_proj"), ("mimo", "model.mtp_layers.0.input_proj"), ("qwen", "mtp.fc")],
)
def test_only_declared_modules_are_passed_over(form: MtpForm, name: str, tmp_path: Path) -> None:
    path = write_mtp(tmp_path, form)
    load_model(path)
    config = json.loads((path / "config.json").read_text())
    for field in {*EXTRA_MODULES} & {*config}:
        config[field] = 0
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="unexpected: ") as error:
        load_model(path)
    assert name.rpartition(".")[0] in str(error.value)
    assert "or let config.json declare all MTP modules that are there (num_nextn_predict_layers or" in str(error.value)


@pytest.mark.parametrize(
    ("form", "modules", "stripped"),
    [("deepseek", 1, False), ("deepseek", 2, False), ("deepseek", 1, True), ("mimo", 1, False), ("qwen", 1, False)],
)
def test_a_layer_too_many_is_no_module(form: MtpForm, modules: int, stripped: bool, tmp_path: Path) -> None:
    """However many are declared, wherever their tensors are, and if there are none."""
    path = write_mtp(tmp_path, form, modules, num_hidden_layers=3)
    if stripped:
        file = path / "model.safetensors"
        kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("model.layers.3.")}
        save_file(kept, file, metadata={"format": "pt"})
    load_model(path)
    config = json.loads((path / "config.json").read_text())
    config.update(num_hidden_layers=2, layer_types=config["layer_types"][:2])
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"unexpected: .*model\.layers\.2\."):
        load_model(path)


def test_more_modules_than_declared(tmp_path: Path) -> None:
    path = write_mtp(tmp_path, "deepseek", 2)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1, "num_mtp_layers": 1}))
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.3\.eh_proj.* declare all MTP modules"):
        load_model(path)


@pytest.mark.parametrize("name", ["model.layers.1.eh_proj.weight", "model.extra.weight", "amtp.fc.weight"])
def test_other_tensors_stay_unexpected(name: str, tmp_path: Path) -> None:
    """However many modules are declared, a superfluous tensor in one of the model's own layers is an error."""
    path = write(tmp_path, "qwen3", num_nextn_predict_layers=1)
    file = path / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(2)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"unexpected: {name}"):
        load_model(path)
