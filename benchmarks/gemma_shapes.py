"""Shapes of Gemma 4's text models and of their assistants, without weights.

Source: the values with which transformers' own script writes the published checkpoints
(`models/gemma4/convert_gemma4_weights.py`); what it leaves out has the default of `Gemma4TextConfig`, which is named
here only where it matters to what a step costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
COMMON: dict[str, Any] = {
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}
SMALL: dict[str, Any] = {
    **COMMON,
    "num_attention_heads": 8,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "max_position_embeddings": 131072,
}
"""Of the models with inputs of single layers."""
LARGE: dict[str, Any] = {
    **COMMON,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
}
E2B: dict[str, Any] = {
    **SMALL,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "layer_types": [*[SLIDING] * 4, FULL] * 7,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}
E4B: dict[str, Any] = {
    **SMALL,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "layer_types": [*[SLIDING] * 5, FULL] * 7,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
}
DENSE_31B: dict[str, Any] = {
    **LARGE,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "layer_types": [*[SLIDING] * 5, FULL] * 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
}
A4B_26B: dict[str, Any] = {
    **LARGE,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "layer_types": [*[SLIDING] * 5, FULL] * 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
SHARING = ("gemma4-e2b", "gemma4-e4b")
"""The shapes whose last layers read the keys and values of others, by their names in model_shapes.py."""


def fewer_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields that say how many layers there are and of which types, for the model's last `layers` layers. As large
    a part of them share keys and values as in the model, if the others are of all types."""
    kinds = list(config["layer_types"][-layers:])
    shared = config.get("num_kv_shared_layers", 0) * layers // config["num_hidden_layers"]
    if set(kinds[: layers - shared]) != set(kinds):
        shared = 0
    return {"num_hidden_layers": layers, "layer_types": kinds, "num_kv_shared_layers": shared}


def assistant_of(target: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the published assistant of a Gemma 4 of this shape: four layers, and centroids where the
    target has inputs of single layers. Raises ValueError for any other model."""
    if "hidden_size_per_layer_input" not in target:
        raise ValueError("only Gemma 4's shapes have assistants; choose another --model, or leave frozen_kv out")
    ordered = bool(target["hidden_size_per_layer_input"])
    same = ("vocab_size", "head_dim", "global_head_dim", "num_key_value_heads", "sliding_window")
    text = {
        "model_type": "gemma4_text",
        **{name: target[name] for name in same},
        "num_global_key_value_heads": target.get("num_global_key_value_heads"),
        "attention_k_eq_v": target.get("attention_k_eq_v", False),
        "hidden_size": 256 if ordered else 1024,
        "intermediate_size": 2048 if ordered else 8192,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": [*[SLIDING] * 3, FULL],
        "num_attention_heads": 4 if ordered else target["num_attention_heads"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": ordered,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "tie_word_embeddings": True,
        "text_config": text,
        "dtype": "bfloat16",
    }
