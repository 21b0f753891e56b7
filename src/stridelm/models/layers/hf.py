"""What the Hugging Face configs of decoders have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from stridelm.kernels.ops import Routing
from stridelm.models.layers.attention import HeadsSpec
from stridelm.models.layers.block import LayerSpec, check_sizes
from stridelm.models.layers.experts import MixtureSpec
from stridelm.models.layers.mlp import GatedMLPSpec
from stridelm.models.layers.rope import RopeSpec

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Hugging Face's names for the activations of kernels.ops."""

EXTRA_MODULES = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Fields that declare how many MTP modules a checkpoint includes beside its layers."""


TENSORS_UNDER = "tensors_under"
"""Attribute of a text part's config: how the names of its tensors begin."""
TIED_AS_HEAD = "tied_as_head"
"""Attribute of a config: whether the matrix of both embedding and output head is stored under the head's name."""
OF_THE_WHOLE = ("architectures", "dtype", "quantization_config", "tie_word_embeddings")
"""Fields of a config with parts that hold for its text part."""


def text_part(config: Any, under: str) -> Any:
    """The config of a checkpoint's text part, whose tensors' names begin with `under`."""
    part = config.get_text_config()
    stated = {name: value for name in OF_THE_WHOLE if (value := getattr(config, name, None)) is not None}
    for name, value in {**stated, TENSORS_UNDER: under}.items():
        setattr(part, name, value)
    return part


def common_fields(config: Any, ropes: Iterable[RopeSpec] | None = None) -> dict[str, Any]:
    """DecoderSpec's fields except the layers, which llama, mistral, qwen2 and qwen3 spell the same way. ropes: the
    layers' rotations; if not given, the one that all of them have.

    Raises ValueError for senseless numbers of modules.
    """
    longest, used = config.max_position_embeddings, [RopeSpec.of(config, head_dim(config))] if ropes is None else ropes
    modules = {name: getattr(config, name, None) or 0 for name in EXTRA_MODULES}
    check_sizes(0, **modules)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "norm_eps": config.rms_norm_eps,
        "max_length": min((rope.context(longest) for rope in used), default=longest),
        "tied": bool(config.tie_word_embeddings),
        "tied_as_head": bool(getattr(config, TIED_AS_HEAD, False)),
        "extra_modules": max(modules.values()),
        "under": getattr(config, TENSORS_UNDER, "model."),
    }


def dense_layers(
    config: Any,
    *,
    sees: Sequence[int | None] | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    partial_rotary: bool = False,
) -> tuple[LayerSpec, ...]:
    """Layers that differ only in their windows. sees: each layer's window; if not given, `windows`. partial_rotary:
    whether the architecture reads `partial_rotary_factor`.

    Raises ValueError for an activation that is not in ACTIVATIONS, and for what LayerSpec's parts refuse.
    """
    check_sizes(num_hidden_layers=config.num_hidden_layers)
    mlp = gated_mlp(config, bias=mlp_bias)
    heads, rope = config.num_attention_heads, RopeSpec.of(config, head_dim(config))
    kv_heads = getattr(config, "num_key_value_heads", None)
    if rope.dim != head_dim(config) and not partial_rotary:
        raise ValueError("partial_rotary_factor other than 1 is not supported for this architecture")
    mixer = HeadsSpec(
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim(config),
        rope=rope,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )
    said = windows(config)  # called even if `sees` is given, because it refuses unknown layer types
    assert len(said) == config.num_hidden_layers
    return tuple(LayerSpec(replace(mixer, window=window), mlp) for window in (said if sees is None else sees))


def mixture_layers(
    layers: Sequence[LayerSpec], mixture: MixtureSpec, is_sparse: Callable[[int], bool]
) -> tuple[LayerSpec, ...]:
    """The layers, with a mixture of experts as the MLP of those that are sparse."""
    return tuple(replace(layer, mlp=mixture) if is_sparse(i) else layer for i, layer in enumerate(layers))


def qwen_mixture_layers(config: Any, layers: Sequence[LayerSpec], **shared: Any) -> tuple[LayerSpec, ...]:
    """The layers of a Qwen, with the experts that its config describes. shared: MixtureSpec's fields for an expert of
    all rows.

    Raises ValueError for numbers that do not add up.
    """
    step, dense = config.decoder_sparse_step, frozenset(config.mlp_only_layers or ())
    check_sizes(decoder_sparse_step=step)
    mixture = MixtureSpec(
        moe_intermediate_size=config.moe_intermediate_size,
        routing=Routing(
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            norm_topk_prob=bool(config.norm_topk_prob),
        ),
        activation=activation_of(config),
        **shared,
    )
    return mixture_layers(layers, mixture, lambda layer: layer not in dense and (layer + 1) % step == 0)


def gated_mlp(config: Any, *, bias: bool = False) -> GatedMLPSpec:
    """Raises ValueError for an activation that is not in ACTIVATIONS."""
    return GatedMLPSpec(intermediate_size=config.intermediate_size, bias=bias, activation=activation_of(config))


def activation_of(config: Any) -> str:
    """The activation as kernels.ops names it. Raises ValueError if it is not in ACTIVATIONS."""
    activation = getattr(config, "hidden_activation", None) or config.hidden_act  # newer configs have both
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def head_dim(config: Any) -> int:
    """Raises ValueError if it is to be computed for no heads."""
    stated: int | None = getattr(config, "head_dim", None)
    if stated is not None:
        return stated
    check_sizes(num_attention_heads=config.num_attention_heads)
    width: int = config.hidden_size // config.num_attention_heads
    return width


def windows(config: Any) -> tuple[int | None, ...]:
    """Each layer's window, from `layer_types` and `sliding_window`."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ValueError(f"layer types {', '.join(unknown)} are not supported; supported: {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)
