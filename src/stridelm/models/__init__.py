"""Architectures by Hugging Face `model_type`. docs/add_a_model.md is the checklist for a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from stridelm.models.layers.decoder import Decoder
from stridelm.registry import Registry

MODELS: Registry[Callable[[Any], Decoder]] = Registry("model type")
for _name in (
    "deepseek_v3",
    "gemma4_text",
    "glm4_moe",
    "kimi_k2",
    "llama",
    "mimo",
    "mistral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
):
    MODELS.add(_name, f"stridelm.models.{_name}:build")

WITH_TEXT: Mapping[str, str] = MappingProxyType({"gemma4": "model.language_model."})
"""Model types of checkpoints with a text part beside others, and how names of that part's tensors begin. It is served
if its own type is one of MODELS."""
