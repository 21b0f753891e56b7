"""`Glm4MoeForCausalLM` (GLM-4.5 and 4.6): heads that are rotated in part, and deepseek_v3's mixtures of experts."""

from __future__ import annotations

from typing import Any

from stridelm.models.deepseek_v3 import after_dense, refuse_unread
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields, dense_layers


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `Glm4MoeConfig`, weights not yet loaded."""
    refuse_unread(config)
    bias, normed = bool(config.attention_bias), bool(config.use_qk_norm)
    layers = dense_layers(config, qkv_bias=bias, qk_norm=normed, partial_rotary=True)
    return Decoder(DecoderSpec(**common_fields(config), **after_dense(layers, config)))
