"""The scales of KV in eight bits that a checkpoint may have: one number for a layer's keys and one for its values, by
which they are divided before they are stored. Names are those of compressed-tensors, ModelOpt and AutoFP8, as vLLM
reads them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from stridelm.cache.layout import UNSCALED
from stridelm.models.files import read_headers, read_tensors
from stridelm.models.layers.decoder import Decoder

SCALE = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d+)\.self_attn\.(?:(?:attn|mla_attn|[kv]_proj)\.)?(?P<kind>k_scale|v_scale|kv_scale)"
)
"""kv_scale is one for both. [kv]_proj is where ModelOpt puts them."""


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name is such a scale."""
    return SCALE.fullmatch(name) is not None


def read_kv_scales(path: Path, model: Decoder) -> dict[int, tuple[float, float]]:
    """Number of a layer of the model -> the scales of its keys and values, for the layers that have any.

    Raises ValueError for one that is not a positive number, and for those of single heads or channels.
    """

    def wanted(name: str) -> bool:
        match = SCALE.fullmatch(name)
        return match is not None and int(match["layer"]) < model.spec.num_layers and not model.leaves_out(name)

    if not any(wanted(name) for name, _ in read_headers(path)):
        return {}
    found: dict[int, dict[str, float]] = {}
    for name, tensor in read_tensors(path, torch.device("cpu"), wanted):
        match = SCALE.fullmatch(name)
        assert match is not None
        if tensor.numel() != 1:
            raise ValueError(
                f"{name} has {tensor.numel()} numbers; KV is stored with one scale for the keys and one for the values "
                "of a layer; leave kv_cache_dtype at 'auto'"
            )
        scale = float(tensor)
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"{name} is {scale}, and not a positive number; leave kv_cache_dtype at 'auto'")
        found.setdefault(int(match["layer"]), {})[match["kind"]] = scale
    return {layer: _pair(scales) for layer, scales in found.items()}


def _pair(scales: dict[str, float]) -> tuple[float, float]:
    both = scales.get("kv_scale")
    keys, values = UNSCALED if both is None else (both, both)
    return scales.get("k_scale", keys), scales.get("v_scale", values)
