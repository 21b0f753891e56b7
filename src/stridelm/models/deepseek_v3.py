"""`DeepseekV3ForCausalLM`: latent attention."""

from __future__ import annotations

import math
from typing import Any

from stridelm.models.layers.block import LayerSpec, check_sizes
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields, gated_mlp
from stridelm.models.layers.latent import LatentSpec
from stridelm.models.layers.rope import RopeSpec, yarn_scale


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `DeepseekV3Config`, weights not yet loaded."""
    check_sizes(num_layers=config.num_hidden_layers)
    if config.first_k_dense_replace < config.num_hidden_layers:
        raise ValueError(
            f"first_k_dense_replace {config.first_k_dense_replace} of {config.num_hidden_layers} layers: experts are "
            "not supported"
        )
    layer = LayerSpec(latent_mixer(config), gated_mlp(config))
    return Decoder(DecoderSpec(**common_fields(config), layers=(layer,) * config.num_hidden_layers))


def latent_mixer(config: Any) -> LatentSpec:
    """Latent attention as such configs describe it. Raises ValueError for sizes that do not add up."""
    if config.num_key_value_heads not in (None, config.num_attention_heads):
        raise ValueError(
            f"num_key_value_heads {config.num_key_value_heads} must equal num_attention_heads "
            f"{config.num_attention_heads}: latents are expanded for each head"
        )
    rope = RopeSpec.of(config, config.qk_rope_head_dim)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return LatentSpec(
        num_heads=config.num_attention_heads,
        rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        q_rank=config.q_lora_rank,
        rope=rope,
        interleaved=bool(config.rope_interleave),
        bias=bool(config.attention_bias),
        scale=width**-0.5 * _rope_scale(rope),
    )


def _rope_scale(rope: RopeSpec) -> float:
    """What stretched rotation multiplies scores by: YaRN's factor for all dimensions, once for the query and once for
    the key."""
    parameters = rope.parameters or {}
    m = parameters.get("mscale_all_dim")
    if rope.kind == "default" or not m:
        return 1.0
    return math.pow(yarn_scale(parameters["factor"], m), 2)
