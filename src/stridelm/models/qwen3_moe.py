"""`Qwen3MoeForCausalLM`: a qwen3 with mixtures of experts; where it slides, all layers do."""

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


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `Qwen3MoeConfig`, weights not yet loaded."""
    bias = bool(getattr(config, "attention_bias", False))
    sees = [config.sliding_window if config.use_sliding_window else None] * config.num_hidden_layers
    layers = dense_layers(config, sees=sees, qkv_bias=bias, o_bias=bias, qk_norm=True)
    mixture = MixtureSpec(
        moe_intermediate_size=config.moe_intermediate_size,
        routing=qwen_routing(config),
        activation=activation_of(config),
    )
    layers = mixture_layers(layers, mixture, qwen_is_sparse(config))
    return Decoder(DecoderSpec(**common_fields(config), layers=layers))
