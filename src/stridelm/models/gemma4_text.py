"""`Gemma4ForCausalLM`: sliding and full layers with heads and rotations of their own, norms on both sides of mixers and
MLPs, layers that read the keys and values of earlier ones, inputs of single layers, and experts beside MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stridelm.kernels.ops import Routing
from stridelm.models.layers.attention import HeadsSpec
from stridelm.models.layers.block import LayerSpec, MLPSpec, check_sizes
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.experts import MixtureSpec
from stridelm.models.layers.hf import activation_of, common_fields, gated_mlp, windows
from stridelm.models.layers.layer_inputs import LayerInputSpec, LayerInputsSpec
from stridelm.models.layers.mlp import GatedMLPSpec
from stridelm.models.layers.parallel_mlps import ParallelMLPsSpec
from stridelm.models.layers.rope import RopeSpec


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `Gemma4TextConfig`, weights not yet loaded."""
    check_sizes(num_hidden_layers=config.num_hidden_layers, hidden_size=config.hidden_size)
    _refuse(config)
    layers = _layers(config)
    ropes = [_mixer(config, layer).rope for layer in range(len(layers))]
    return Decoder(
        DecoderSpec(
            **common_fields(config, ropes),
            layers=layers,
            embedding_scale=config.hidden_size**0.5,
            logit_cap=config.final_logit_softcapping,
            given=_given(config),
        )
    )


def _refuse(config: Any) -> None:
    """Raise ValueError for settings that are not supported, and layers that do not add up."""
    kinds, count, shared = config.layer_types, config.num_hidden_layers, config.num_kv_shared_layers
    _check_kinds(config)
    check_sizes(0, num_kv_shared_layers=shared)
    for kind in kinds[count - shared :] if shared <= count else kinds:
        if kind not in kinds[: max(0, count - shared)]:
            raise ValueError(f"num_kv_shared_layers {shared} of {count} leave no layer of type {kind} to read from")
    if config.use_bidirectional_attention == "all":  # "vision" is of images' tokens, which are not served
        raise ValueError("use_bidirectional_attention 'all' is not supported: a token may see only those before it")


def _check_kinds(config: Any) -> None:
    kinds, count = config.layer_types, config.num_hidden_layers
    if len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} layers, num_hidden_layers {count}")
    windows(config)
    check_sizes(sliding_window=config.sliding_window)


def _layers(config: Any) -> tuple[LayerSpec, ...]:
    mlp, width, first = gated_mlp(config), config.hidden_size_per_layer_input, _first_shared(config)
    wide = replace(mlp, intermediate_size=mlp.intermediate_size * (2 if config.use_double_wide_mlp else 1))
    given = LayerInputSpec(width=width, activation=activation_of(config)) if width else None
    return tuple(
        LayerSpec(
            mixer=_mixer(config, layer),
            mlp=_mlp(config, mlp if layer < first else wide),
            norms_after=True,
            given=given,
            scaled=True,
        )
        for layer in range(config.num_hidden_layers)
    )


def _mlp(config: Any, mlp: GatedMLPSpec) -> MLPSpec:
    """The MLP, beside which there are experts if the config says so."""
    if not config.enable_moe_block:
        return mlp
    check_sizes(top_k_experts=config.top_k_experts)
    routing = Routing(num_experts=config.num_experts, num_experts_per_tok=config.top_k_experts, norm_topk_prob=True)
    width, activation = config.moe_intermediate_size, activation_of(config)
    mixture = MixtureSpec(moe_intermediate_size=width, routing=routing, activation=activation, stacked=True)
    return ParallelMLPsSpec(mlp=mlp, mixture=mixture)


def _first_shared(config: Any) -> int:
    """The first of the layers that read others' keys and values."""
    first: int = config.num_hidden_layers - config.num_kv_shared_layers
    return first


def _given(config: Any) -> LayerInputsSpec | None:
    vocab_size, width = config.vocab_size_per_layer_input, config.hidden_size_per_layer_input
    check_sizes(0, hidden_size_per_layer_input=width)
    if not width:
        return None
    if isinstance(vocab_size, int) and vocab_size < config.vocab_size:
        raise ValueError(f"vocab_size_per_layer_input {vocab_size} is less than vocab_size {config.vocab_size}")
    return LayerInputsSpec(vocab_size=vocab_size, layers=config.num_hidden_layers, width=width)


def reading_layers(config: Any, sources: Mapping[str, int]) -> tuple[LayerSpec, ...]:
    """The layers of an assistant (`Gemma4AssistantForCausalLM`), which read another model's keys and values. config: a
    `Gemma4TextConfig`. sources: layer type -> the number of the layer that is read. Raises ValueError for settings that
    are not supported."""
    check_sizes(num_hidden_layers=config.num_hidden_layers, hidden_size=config.hidden_size)
    windows(config)
    if len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types has {len(config.layer_types)} layers, num_hidden_layers {config.num_hidden_layers}"
        )
    mlp = gated_mlp(config)
    return tuple(
        LayerSpec(replace(_own_mixer(config, layer), reads=sources[kind]), mlp, norms_after=True, scaled=True)
        for layer, kind in enumerate(config.layer_types)
    )


def _mixer(config: Any, layer: int) -> HeadsSpec:
    """A shared layer reads the last layer of its type that is not shared."""
    mixer, kind = _own_mixer(config, layer), config.layer_types[layer]
    unshared = config.layer_types[: _first_shared(config)]
    if layer < len(unshared):
        return mixer
    source = max(number for number, other in enumerate(unshared) if other == kind)
    own, read = config.per_layer_config[layer], config.per_layer_config[source]
    if (read.head_dim, read.num_key_value_heads) != (own.head_dim, own.num_key_value_heads):
        raise ValueError(
            f"layer {layer} has {own.num_key_value_heads} KV heads of {own.head_dim}, but layer {source}, which it is "
            f"to read, has {read.num_key_value_heads} of {read.head_dim}"
        )
    return replace(mixer, reads=source)


def _own_mixer(config: Any, layer: int) -> HeadsSpec:
    """A layer's mixer, as if it kept keys and values of its own."""
    kind, own, bias = config.layer_types[layer], config.per_layer_config[layer], bool(config.attention_bias)
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
