"""Rotary positions against transformers: frequencies, and how far each kind lengthens the context."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stridelm import LLM, SamplingParams
from stridelm.models.layers.rope import RopeSpec, lengthen
from stridelm.models.loader import build_empty, load_config
from support.checkpoints.changed import copied
from support.oracles.models import FULL, SLIDING, check_model

Checkpoint = Callable[..., Path]
THETA = {"rope_theta": 10000.0}
ORIGINAL = 32
"""The context before it is stretched; prompts of `check_model` are longer."""
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0, **THETA}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, **THETA}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    **THETA,
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("rope", [LINEAR, YARN], ids=["linear", "yarn"])
def test_stretched_contexts(checkpoint: Checkpoint, rope: dict[str, Any], kind: str) -> None:
    """The context is `factor` times the original one, and beyond the latter logits are transformers'."""
    path = checkpoint(kind, scale=3.0, max_position_embeddings=ORIGINAL, rope_parameters=rope)
    assert build_empty(load_config(path), path).spec.max_length == 4 * ORIGINAL
    check_model(path, 33)


CONTEXTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "default": ({"rope_type": "default", **THETA}, 128, 128),
    "llama3 is stated as stretched": (LLAMA3, 128, 128),
    "linear": (LINEAR, 128, 512),
    "a linear fraction": ({**LINEAR, "factor": 1.3}, 128, 166),
    "yarn": (YARN, ORIGINAL, 128),
    "yarn stated as stretched": (YARN, 128, 128),
    "yarn stated as longer": (YARN, 200, 200),
    "yarn beside the room for an answer": (YARN, 40, 128),
    "yarn by its lengths": ({**YARN, "factor": None}, 96, 96),
    "yarn without the original": ({"rope_type": "yarn", "factor": 4.0, **THETA}, 128, 512),
    "dynamic is not a function of position beyond": ({**LINEAR, "rope_type": "dynamic"}, 128, 128),
    "proportional": ({**LINEAR, "rope_type": "proportional", "partial_rotary_factor": 0.5}, 128, 512),
    "DeepSeek-V3": ({**YARN, "factor": 40.0, "original_max_position_embeddings": 4096}, 163840, 163840),
}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts(checkpoint: Checkpoint, tmp_path: Path, name: str, spelling: str) -> None:
    """The context of a config, in the spelling of new files and in that of old ones. No factor counts twice."""
    rope, stated, wanted = CONTEXTS[name]
    path = copied(checkpoint("llama"), tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": stated}
    if spelling == "rope_parameters":
        config["rope_parameters"] = rope
    else:
        del config["rope_parameters"]
        scaling = {"type" if key == "rope_type" else key: value for key, value in rope.items() if key != "rope_theta"}
        config |= {"rope_scaling": scaling, **THETA}
    (path / "config.json").write_text(json.dumps(config))
    assert build_empty(load_config(path), path).spec.max_length == wanted


def test_the_shortest_reach_of_layers_counts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Where layers rotate by their types, a context that only some of them stretch is that of the others."""
    path = copied(checkpoint("gemma4_text"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    for sliding, wanted in (({"rope_type": "default", **THETA}, 256), (LINEAR, 1024)):
        config["rope_parameters"] = {FULL: LINEAR, SLIDING: sliding}
        (path / "config.json").write_text(json.dumps(config))
        assert build_empty(load_config(path), path).spec.max_length == wanted


def test_max_model_len_up_to_the_stretched_context(checkpoint: Checkpoint) -> None:
    """Lengths up to it are served, and longer ones refused by option name."""
    path = checkpoint("llama", scale=3.0, max_position_embeddings=ORIGINAL, rope_parameters=YARN)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "drafter": "none", "num_pages": 40}
    for length in ({}, {"max_model_len": 4 * ORIGINAL}):
        llm = LLM(str(path), **settings, **length)
        out = llm.generate([1] * (4 * ORIGINAL - 4), SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0]
        assert len(out.token_ids) == 4
    with pytest.raises(ValueError, match="max_model_len 129 exceeds the 128 tokens"):
        LLM(str(path), max_model_len=4 * ORIGINAL + 1, **settings)


@pytest.mark.parametrize("kind", ["llama", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("length", [40, 2 * ORIGINAL, 4 * ORIGINAL])
def test_dynamic_scaling_of_a_length(checkpoint: Checkpoint, tmp_path: Path, kind: str, length: int) -> None:
    """A context that is asked for has transformers' frequencies for a prompt of that length, at every position."""
    rope = {**LINEAR, "rope_type": "dynamic"}
    path = checkpoint(kind, scale=3.0, max_position_embeddings=ORIGINAL, rope_parameters=rope)
    config = load_config(path)
    lengthen(config, length)
    spec = build_empty(config, path).spec
    assert spec.max_length == length
    wanted, _ = ROPE_INIT_FUNCTIONS["dynamic"](load_config(path), "cpu", seq_len=length)
    mixer: Any = spec.layers[0].mixer
    torch.testing.assert_close(mixer.rope.frequencies()[0], wanted)
    llm = LLM(str(path), max_model_len=length, skip_tokenizer_init=True, drafter="none", num_pages=40)
    out = llm.generate([1] * (length - 4), SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0]
    assert len(out.token_ids) == 4


@pytest.mark.parametrize("original", [1, 6, 8, 40, 200, 4096])
@pytest.mark.parametrize("beta_slow", [1, 2, 7])
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("dim", [2, 10, 64])
def test_yarn_frequencies(original: int, beta_slow: int, truncate: bool, dim: int) -> None:
    """Also where the ramp between the rotations kept and those divided is empty, or runs backwards."""
    yarn = {**YARN, "factor": 3.7, "rope_theta": 500.0, "original_max_position_embeddings": original}
    config = LlamaConfig(
        hidden_size=5 * dim,
        num_attention_heads=5,
        head_dim=dim,
        max_position_embeddings=256,
        rope_parameters={**yarn, "beta_fast": 16, "beta_slow": beta_slow, "truncate": truncate},
    )
    ours, factor = RopeSpec.of(config, dim).frequencies()
    theirs, their_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=0) and factor == pytest.approx(their_factor)
