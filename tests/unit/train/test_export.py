"""The exported model is the trained one, and transformers reads it as the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stridelm.models.layers.decoder import Decoder
from stridelm.train.export import checkpoint_tensors, export, load_for_training
from stridelm.train.objective import plain_hidden


@pytest.fixture
def trained(tiny_model: Decoder) -> Decoder:
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return tiny_model


def test_transformers_computes_the_same_logits(trained: Decoder, config: Any, tmp_path: Path) -> None:
    config.mask_token_id, config.mask_k_max = 63, 8
    export(trained, config, tmp_path, tmp_path, {"stage": "test"}, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = trained.logits(plain_hidden(trained, ids)).unflatten(0, ids.shape)
        torch.testing.assert_close(ours, theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_directory_says_what_it_is(trained: Decoder, config: Any, tmp_path: Path) -> None:
    config.mask_token_id, config.mask_k_max = 63, 8
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    export(trained, config, tmp_path / "out", tmp_path / "tok", {"stage": "test"})
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3ForCausalLM"]
    assert (written["model_type"], written["mask_token_id"], written["mask_k_max"]) == ("qwen3", 63, 8)
    assert written["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "provenance.json").read_text()) == {"stage": "test"}


def test_training_starts_from_the_exported_weights(trained: Decoder, config: Any, tmp_path: Path) -> None:
    export(trained, config, tmp_path, tmp_path, {}, dtype=torch.float32)
    again, _ = load_for_training(tmp_path)
    for name, tensor in checkpoint_tensors(trained, torch.float32).items():
        assert torch.equal(checkpoint_tensors(again, torch.float32)[name], tensor), name
    assert all(parameter.requires_grad for parameter in again.parameters())
