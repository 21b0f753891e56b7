"""`Qwen3MoeForCausalLM`: a qwen3 with mixtures of experts; where it slides, all layers do."""

from __future__ import annotations

from typing import Any

from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields, dense_layers, qwen_mixture_layers


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `Qwen3MoeConfig`, weights not yet loaded."""
    bias = bool(getattr(config, "attention_bias", False))
    sees = [config.sliding_window if config.use_sliding_window else None] * config.num_hidden_layers
    layers = dense_layers(config, sees=sees, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return Decoder(DecoderSpec(**common_fields(config), layers=qwen_mixture_layers(config, layers)))
