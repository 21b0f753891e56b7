"""What the Hugging Face configs of dense decoders have in common."""

from __future__ import annotations

from typing import Any

from stridelm.models.layers.rope import RopeSpec

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""What Hugging Face calls the activations of kernels.ops."""

EXTRA_MODULES = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Fields that declare how many modules for further tokens a checkpoint carries beside its layers."""


def common_fields(config: Any) -> dict[str, Any]:
    """DecoderSpec's fields that llama, mistral, qwen2 and qwen3 spell the same way.

    Raises ValueError for an activation that is not in ACTIVATIONS, and for quantised weights.
    """
    if getattr(config, "quantization_config", None):
        raise ValueError("quantised weights are not supported; give the checkpoint that they were made from")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act  # newer configs have both
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = RopeSpec.of(config, head_dim)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "norm_eps": config.rms_norm_eps,
        "rope": rope,
        "max_length": rope.limit or config.max_position_embeddings,
        "windows": windows(config),
        "tied": bool(config.tie_word_embeddings),
        "activation": ACTIVATIONS[activation],
        "extra_modules": max(int(getattr(config, name, None) or 0) for name in EXTRA_MODULES),
    }


def windows(config: Any) -> tuple[int | None, ...]:
    """How far back each layer sees, from `layer_types` and `sliding_window`."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ValueError(f"layer types {', '.join(unknown)} are not supported; supported: {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)
