"""`LlamaForCausalLM`: rotary positions with optional scaling, biases only where the config asks for them."""

from __future__ import annotations

from typing import Any

from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields, dense_layers


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `LlamaConfig`, weights not yet loaded."""
    bias = bool(getattr(config, "attention_bias", False))
    layers = dense_layers(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(getattr(config, "mlp_bias", False)))
    return Decoder(DecoderSpec(**common_fields(config), layers=layers))
