"""`Gemma4ForCausalLM`: sliding and full layers with heads and rotations of their own, and norms on both sides of
mixers and MLPs."""

from __future__ import annotations

from typing import Any

from stridelm.models.layers.attention import HeadsSpec
from stridelm.models.layers.block import LayerSpec, check_sizes
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields, gated_mlp, windows
from stridelm.models.layers.rope import RopeSpec


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `Gemma4TextConfig`, weights not yet loaded."""
    check_sizes(num_hidden_layers=config.num_hidden_layers, hidden_size=config.hidden_size)
    _refuse(config)
    mixers = tuple(_mixer(config, layer) for layer in range(config.num_hidden_layers))
    mlp = gated_mlp(config)
    return Decoder(
        DecoderSpec(
            **common_fields(config, [mixer.rope for mixer in mixers]),
            layers=tuple(LayerSpec(mixer, mlp, norms_after=True, scaled=True) for mixer in mixers),
            embedding_scale=config.hidden_size**0.5,
            logit_cap=config.final_logit_softcapping,
        )
    )


def _refuse(config: Any) -> None:
    """Raise ValueError for settings that are not supported, and layers that do not add up."""
    kinds, count = config.layer_types, config.num_hidden_layers
    if len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} layers, num_hidden_layers {count}")
    windows(config)
    check_sizes(sliding_window=config.sliding_window)
    if config.use_bidirectional_attention == "all":  # "vision" is of images' tokens, which are not served
        raise ValueError("use_bidirectional_attention 'all' is not supported: a token may see only those before it")
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers", "enable_moe_block"):
        if getattr(config, name):
            raise ValueError(f"{name} {getattr(config, name)!r} is not supported; supported: 0")


def _mixer(config: Any, layer: int) -> HeadsSpec:
    kind, own = config.layer_types[layer], config.per_layer_config[layer]
    bias = bool(config.attention_bias)
    return HeadsSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        rope=RopeSpec.of(config, own.head_dim, kind),
        window=windows(config)[layer],
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        value_norm=True,
        keys_as_values=bool(config.attention_k_eq_v) and kind == "full_attention",
        scale=1.0,
    )
