"""Checkpoints in eight bits, made of dense ones by the formats' definitions, one block after another."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
FORMS = ("block", "powers", "channel")
"""By block, where scales may be powers of two, and by channel."""
SUMS = ("block", "channel")
"""Those whose products are summed differently."""
SCALES = {"block": "weight_scale_inv", "powers": "weight_scale_inv", "channel": "weight_scale"}
LEAVES = ("embed_tokens", "lm_head", ".gate.", "shared_expert_gate", "eh_proj", "input_proj", "norm")
"""Parts of the names of matrices that published checkpoints leave dense."""
BLOCK_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
CHANNEL_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
CONFIGS = {"block": BLOCK_CONFIG, "powers": {**BLOCK_CONFIG, "scale_fmt": "ue8m0"}, "channel": CHANNEL_CONFIG}


def is_quantised(name: str) -> bool:
    """Whether published checkpoints quantise a tensor of this name."""
    return "_proj" in name and name.endswith(".weight") and not any(part in name for part in LEAVES)


def by_definition(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight in e4m3, scales), from the largest magnitude that shares a scale."""
    height = 1 if form == "channel" else BLOCK
    width = weight.shape[1] if form == "channel" else BLOCK
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    for i, rows in enumerate(weight.split(height)):
        for j, block in enumerate(rows.split(width, 1)):
            scales[i, j] = block.abs().max().float() / 448
            if form == "powers":
                scales[i, j] = up_to_power(float(scales[i, j]))
            part = (block.float() / scales[i, j]).to(torch.float8_e4m3fn)
            stored[i * height : (i + 1) * height, j * width : (j + 1) * width] = part
    return stored, scales


def up_to_power(number: float) -> float:
    """The least power of two that is not below it."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def write_fp8(
    target: Path,
    source: Path,
    form: str,
    *,
    leaves: Callable[[str], bool] = lambda name: False,
    **quantization: Any,
) -> Path:
    """A copy of a checkpoint with its matrices quantised, except those that `leaves` names. quantization: changes of
    config.json's entry."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for file in target.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if not is_quantised(name) or leaves(name):
                tensors[name] = tensor
                continue
            tensors[name], scale = by_definition(tensor, form)
            tensors[name.removesuffix("weight") + SCALES[form]] = scale
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {**CONFIGS[form], **quantization}
    (target / "config.json").write_text(json.dumps(config))
    return target
