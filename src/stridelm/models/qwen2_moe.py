"""`Qwen2MoeForCausalLM`: a qwen2 with mixtures of experts, one of which all rows share, scaled by a gate of its own."""

from __future__ import annotations

from typing import Any

from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.experts import MixtureSpec
from stridelm.models.layers.hf import (
    activation_of,
    common_fields,
    dense_layers,
    mixture_layers,
    qwen_is_sparse,
    qwen_routing,
)
from stridelm.models.layers.mlp import GatedMLPSpec


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `Qwen2MoeConfig`, weights not yet loaded."""
    activation, width = activation_of(config), config.shared_expert_intermediate_size
    mixture = MixtureSpec(
        moe_intermediate_size=config.moe_intermediate_size,
        routing=qwen_routing(config),
        shared=GatedMLPSpec(name="shared_expert", intermediate_size=width, activation=activation),
        shared_gate="shared_expert_gate",
        activation=activation,
    )
    layers = mixture_layers(dense_layers(config, qkv_bias=bool(config.qkv_bias)), mixture, qwen_is_sparse(config))
    return Decoder(DecoderSpec(**common_fields(config), layers=layers))
