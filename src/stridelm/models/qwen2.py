"""`Qwen2ForCausalLM`: query, key and value with biases; sliding layers where `layer_types` says so."""

from __future__ import annotations

from typing import Any

from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields, dense_layers


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `Qwen2Config`, weights not yet loaded."""
    return Decoder(DecoderSpec(**common_fields(config), layers=dense_layers(config, qkv_bias=True)))
