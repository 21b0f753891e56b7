"""Tiny random assistants (transformers' `Gemma4AssistantForCausalLM`) for targets of any family whose layers keep heads
of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from support.checkpoints.heads import SCALE, Draws, Tensors, config_of, write_head

FULL, SLIDING = "full_attention", "sliding_attention"
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def kinds_of(target: dict[str, Any]) -> list[str]:
    """The type of each layer that keeps keys and values of its own; none if the layers keep something else."""
    layers = target["num_hidden_layers"]
    if target.get("kv_lora_rank"):
        return []
    slides = target["model_type"] == "mistral" and target.get("sliding_window")
    kinds = target.get("layer_types") or [SLIDING if slides else FULL] * layers
    return list(kinds[: layers - (target.get("num_kv_shared_layers") or 0)])


def write_assistant(
    path: Path,
    target_path: Path,
    kinds: Sequence[str] | None = None,
    centroids: tuple[int, int] | None = None,
    *,
    tied: bool = True,
    seed: int = 1,
    scale: float = SCALE,
    **changes: Any,
) -> Path | None:
    """An assistant for a target; None if there can be none, because no layer with full attention keeps its own.

    kinds: of its layers; by default one of each that the target has. centroids: how many there are, and how many of
    them are best. changes: fields of its text_config.
    """
    target = config_of(target_path)
    theirs = kinds_of(target)
    if FULL not in theirs:  # a Gemma 4's last layer has full attention whatever its config says
        return None
    kinds = [kind for kind in (SLIDING, FULL) if kind in theirs] if kinds is None else list(kinds)
    text = _text_config(target, theirs, kinds) | changes
    draws, read = Draws(seed, scale), target["hidden_size"]
    config: dict[str, Any] = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": read,
        "tie_word_embeddings": tied,
        "use_ordered_embeddings": centroids is not None,
        "text_config": text,
        "dtype": "float32",
    }
    width, vocab = text["hidden_size"], text["vocab_size"]
    tensors: Tensors = {
        "pre_projection.weight": draws.matrix(width, 2 * read),
        "post_projection.weight": draws.matrix(read, width),
        "model.norm.weight": draws.norm(width),
        "model.embed_tokens.weight": draws.matrix(vocab, width),
    }
    if not tied:
        tensors["lm_head.weight"] = draws.matrix(vocab, width)
    for number in range(len(kinds)):
        tensors |= _layer(draws, text, number)
    if centroids is not None:
        config |= {"num_centroids": centroids[0], "centroid_intermediate_top_k": centroids[1]}
        tensors["masked_embedding.centroids.weight"] = draws.matrix(centroids[0], width)
        tensors["masked_embedding.token_ordering"] = torch.randperm(vocab, generator=draws.generator)
    return write_head(path, config, tensors, "model.safetensors")


def _text_config(target: dict[str, Any], theirs: list[str], kinds: list[str]) -> dict[str, Any]:
    ropes = target.get("rope_parameters") or _older_ropes(target)
    heads, width = target["num_attention_heads"], target["hidden_size"]
    usual = {"head_dim": target.get("head_dim") or width // heads}
    usual["num_key_value_heads"] = target.get("num_key_value_heads") or heads
    of_kind = {kind: usual | _own(target, len(theirs) - 1 - theirs[::-1].index(kind)) for kind in set(kinds)}
    text = {
        "model_type": "gemma4_text",
        "vocab_size": target["vocab_size"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(kinds),
        "num_kv_shared_layers": len(kinds),
        "num_attention_heads": 2 * max(each["num_key_value_heads"] for each in of_kind.values()),
        "layer_types": kinds,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": target["max_position_embeddings"],
        "rope_parameters": ropes if FULL in ropes else {FULL: ropes, SLIDING: ropes},
        "per_layer_config": {str(i): of_kind[kind] for i, kind in enumerate(kinds)},
        **{name: target.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **usual,
    }
    return text | ({"sliding_window": target["sliding_window"]} if SLIDING in kinds else {})


def _older_ropes(target: dict[str, Any]) -> dict[str, Any]:
    """Of a config in the older spellings: the base, and what it is scaled by, if anything, have names of their own."""
    stated = target.get("rope_scaling") or {"rope_type": "default"}
    scaling = {name if name != "type" else "rope_type": value for name, value in stated.items()}
    return {"rope_theta": target["rope_theta"], **scaling}


def _own(target: dict[str, Any], layer: int) -> dict[str, Any]:
    own: dict[str, Any] = (target.get("per_layer_config") or {}).get(str(layer), {})
    return own


def _layer(draws: Draws, text: dict[str, Any], number: int) -> Tensors:
    prefix, width, inner = f"model.layers.{number}.", text["hidden_size"], text["intermediate_size"]
    size = text["per_layer_config"][str(number)]["head_dim"]
    heads = text["num_attention_heads"] * size
    return {
        prefix + "layer_scalar": draws.norm(1),
        prefix + "self_attn.q_proj.weight": draws.matrix(heads, width),
        prefix + "self_attn.q_norm.weight": draws.norm(size),
        prefix + "self_attn.o_proj.weight": draws.matrix(width, heads),
        prefix + "mlp.gate_proj.weight": draws.matrix(inner, width),
        prefix + "mlp.up_proj.weight": draws.matrix(inner, width),
        prefix + "mlp.down_proj.weight": draws.matrix(width, inner),
        **{f"{prefix}{name}.weight": draws.norm(width) for name in NORMS},
    }
