"""The comparison with llama.cpp: the same weights under GGUF's names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from against_llama_cpp import unpacked
from gguf_file import gguf_name, rope_theta, write_gguf
from llama_cpp import LlamaCpp

from stridelm.builtin import builtin_path
from stridelm.models.files import read_tensors


def test_every_tensor_has_a_name_of_its_own() -> None:
    names = [gguf_name(name) for name, _ in read_tensors(builtin_path(), torch.device("cpu"))]
    assert len(set(names)) == len(names)
    assert {"token_embd.weight", "blk.0.attn_q.weight", "blk.7.ffn_down.weight", "output_norm.weight"} <= set(names)
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.mlp.experts.weight")


@pytest.mark.parametrize(
    "config", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}]
)
def test_old_and_new_checkpoints_name_their_rotary_base(config: dict[str, object]) -> None:
    assert rope_theta(config) == 1e6


def test_weights_in_the_file_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Bit for bit, matrices as bfloat16 and vectors as float32."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(write_gguf(builtin_path(), tmp_path / "m.gguf")).tensors}
    for name, tensor in read_tensors(builtin_path(), torch.device("cpu")):
        found = read.pop(gguf_name(name))
        if tensor.dim() > 1:
            assert found.tensor_type.name == "BF16"
            assert np.array_equal(found.data.view(np.int16), tensor.view(torch.int16).numpy())
        else:
            assert np.array_equal(found.data, tensor.float().numpy())
    assert not read


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ValueError, match="qwen3 only"):
        write_gguf(tmp_path, tmp_path / "m.gguf")


def test_a_missing_library_says_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="npm pack"):
        LlamaCpp(tmp_path, tmp_path / "m.gguf", 1, 1, 16)
    with pytest.raises(SystemExit, match="npm pack"):
        unpacked(tmp_path / "nothing.tgz", tmp_path)
    assert unpacked(tmp_path, tmp_path / "elsewhere") == tmp_path
