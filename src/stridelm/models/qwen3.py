"""`Qwen3ForCausalLM`: queries and keys are normalised per head before they are rotated."""

from __future__ import annotations

from typing import Any

from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields, dense_layers


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `Qwen3Config`, weights not yet loaded."""
    bias = bool(getattr(config, "attention_bias", False))
    layers = dense_layers(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return Decoder(DecoderSpec(**common_fields(config), layers=layers))
