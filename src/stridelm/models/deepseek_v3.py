"""`DeepseekV3ForCausalLM`: latent attention, and mixtures of experts after some dense layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stridelm.kernels.ops import Routing
from stridelm.models.layers.block import LayerSpec, check_sizes
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.experts import MixtureSpec
from stridelm.models.layers.hf import activation_of, common_fields, gated_mlp, mixture_layers
from stridelm.models.layers.latent import LatentSpec
from stridelm.models.layers.mlp import GatedMLPSpec
from stridelm.models.layers.rope import RopeSpec, yarn_scale

ONLY = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Fields of published configs that transformers does not read, and the value that it takes them to have."""


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `DeepseekV3Config`, weights not yet loaded."""
    check_sizes(num_hidden_layers=config.num_hidden_layers)
    refuse_unread(config)
    layers = (LayerSpec(latent_mixer(config), gated_mlp(config)),) * config.num_hidden_layers
    return Decoder(DecoderSpec(**common_fields(config), **after_dense(layers, config)))


def refuse_unread(config: Any) -> None:
    """Raise ValueError for a field of ONLY with another value."""
    for name, value in ONLY.items():
        if getattr(config, name, None) not in (None, value):
            raise ValueError(f"{name} {getattr(config, name)!r} is not supported; supported: {value!r}")


def after_dense(layers: Sequence[LayerSpec], config: Any) -> dict[str, Any]:
    """DecoderSpec's fields of layers: all but the leading dense ones have a mixture of experts, and so has an MTP
    module, even if no layer has (transformers' `get_mtp_config`). Raises ValueError for numbers that do not add up."""
    dense = config.first_k_dense_replace
    check_sizes(0, first_k_dense_replace=dense)
    if not config.n_routed_experts and dense >= len(layers):
        return {"layers": tuple(layers)}
    experts = mixture(config)
    sparse = mixture_layers(layers, experts, lambda layer: layer >= dense)
    return {"layers": sparse, "module_layer": replace(layers[-1], mlp=experts)}


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
    return yarn_scale(parameters["factor"], m) ** 2


def mixture(config: Any) -> MixtureSpec:
    """Experts as such configs describe them. Raises ValueError for numbers that do not add up."""
    activation, width = activation_of(config), config.moe_intermediate_size
    shared = None
    check_sizes(n_routed_experts=config.n_routed_experts, moe_intermediate_size=width)
    if config.n_shared_experts:
        check_sizes(n_shared_experts=config.n_shared_experts)
        shared = GatedMLPSpec(
            name="shared_experts", intermediate_size=width * config.n_shared_experts, activation=activation
        )
    return MixtureSpec(
        moe_intermediate_size=width,
        routing=Routing(
            num_experts=config.n_routed_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            scoring="sigmoid",
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=bool(config.norm_topk_prob),
            routed_scaling_factor=config.routed_scaling_factor,
        ),
        correction_bias=True,
        shared=shared,
        activation=activation,
    )
