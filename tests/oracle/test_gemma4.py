"""What Gemma 4's configs and checkpoints have that other families' do not."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.cache.layout import HeadsKV, Shared
from stridelm.models.loader import load_model
from support.checkpoints.changed import copied, rewritten
from support.oracles.models import FULL, SLIDING, VARIANTS, check_model

Checkpoint = Callable[..., Path]
SHARED = VARIANTS["gemma4_text"]["shared-with-inputs"]


def test_leftovers_of_shared_layers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Keys and values of layers that read those of others are skipped, as by transformers; those of others are not."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.5.self_attn.{part}.weight"] = torch.zeros(3)

    path = checkpoint("gemma4_text", scale=3.0, **SHARED)
    check_model(rewritten(path, tmp_path / "whole", add), 1024)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.1\.self_attn\.v_proj"):
        load_model(rewritten(path, tmp_path / "wrong", lambda t: t.update({QKV: torch.zeros(3)})))


QKV = "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.parametrize("variant", ["shared-with-inputs", "experts"])
def test_the_text_part_of_a_checkpoint_with_images(
    checkpoint: Checkpoint, variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is served as the text alone would be, and the log says what is left out."""
    with caplog.at_level(logging.INFO, "stridelm"):
        check_model(checkpoint("gemma4", scale=3.0, **VARIANTS["gemma4_text"][variant]), 7)
    assert re.search(r"tensors left out: embed_vision \(1\), vision_tower \(\d\d\)", caplog.text)


def test_a_text_part_of_another_type(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = copied(checkpoint("gemma4"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["model_type"] = "gpt2"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="gpt2"):
        load_model(path)


def test_what_layers_keep(checkpoint: Checkpoint) -> None:
    """Widths, head counts and scales are each state's own; shared layers read the last of their type that is not."""
    states = load_model(checkpoint("gemma4_text", **{**SHARED, "global_head_dim": 32})).layer_states
    sliding, full = HeadsKV.of(4, 2, 16, 9, scale=1.0), HeadsKV.of(4, 1, 32, scale=1.0)
    shared = (Shared(sliding.group, 9, 0, sliding), Shared(full.group, None, 1, full))
    assert states == (sliding, full, *shared, *shared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"layer_types": [SLIDING, "chunked_attention", SLIDING, FULL, SLIDING, FULL]}, "chunked_attention"),
        ({"layer_types": [FULL, FULL, SLIDING, FULL, SLIDING, FULL]}, "leave no layer of type sliding_attention"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers 6 of 6 leave no layer of type sliding_attention"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers 7 of 6 leave no layer"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be at least 0"),
        ({"per_layer_config": {"5": {"head_dim": 32}}}, "layer 5 has 2 KV heads of 32, but layer 1, which it is to"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input must be at least 1"),
        ({"vocab_size_per_layer_input": 63}, "vocab_size_per_layer_input 63 is less than vocab_size 64"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"final_logit_softcapping": -2.0}, "final_logit_softcapping must be a number above 0"),
        ({"hidden_activation": "relu"}, "relu.*supported: silu"),
        ({"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 1e4}}}, "sliding_attention"),
        ({"rope_parameters": {k: {"rope_type": "longrope", "rope_theta": 1e4} for k in (FULL, SLIDING)}}, "longrope"),
    ],
)
def test_refused(checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """By name, before any weight is read."""
    path = copied(checkpoint("gemma4_text", **SHARED), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_experts must be at least 1"),
        ({"top_k_experts": 0}, "top_k_experts must be at least 1"),
        ({"top_k_experts": 7}, "7 exceeds the 6 experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be at least 1"),
        ({"num_experts": 5}, r"experts\.down_proj is \[6, 64, 32\], config\.json says \[5, 64, 32\]"),
        ({"moe_intermediate_size": 31}, r"experts\.gate_up_proj is \[6, 64, 64\], config\.json says \[6, 62, 64\]"),
        ({"enable_moe_block": False}, r"unexpected: model\.layers\.0\.experts\.down_proj"),
    ],
)
def test_refused_mixtures(checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Experts that do not add up, in config.json or between it and the weights."""
    path = copied(checkpoint("gemma4_text", **VARIANTS["gemma4_text"]["experts"]), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=message):
        load_model(path)
