"""`Qwen2MoeForCausalLM`: a qwen2 with mixtures of experts, one of which all rows share, scaled by a gate of its own."""

from __future__ import annotations

from typing import Any

from stridelm.models.layers.block import check_sizes
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import activation_of, common_fields, dense_layers, qwen_mixture_layers
from stridelm.models.layers.mlp import GatedMLPSpec


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `Qwen2MoeConfig`, weights not yet loaded."""
    width = config.shared_expert_intermediate_size
    check_sizes(shared_expert_intermediate_size=width)
    shared = GatedMLPSpec(name="shared_expert", intermediate_size=width, activation=activation_of(config))
    layers = dense_layers(config, qkv_bias=bool(config.qkv_bias))
    layers = qwen_mixture_layers(config, layers, shared=shared, shared_gate="shared_expert_gate")
    return Decoder(DecoderSpec(**common_fields(config), layers=layers))
