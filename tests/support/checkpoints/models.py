"""Tiny random checkpoints of every registered model type, written by transformers' own `save_pretrained`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3ForCausalLM, Qwen2ForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from stridelm.models.kimi_k2 import KimiK2Config
from stridelm.models.mimo import MiMoConfig

EOS = 2
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}


EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GROUPED: dict[str, Any] = {
    "num_nextn_predict_layers": 0,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
LATENT: dict[str, Any] = {
    **GROUPED,
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
ALTERNATING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
}
SMALL_OF: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "gemma4_text": ALTERNATING,
    "glm4_moe": GROUPED,
    "kimi_k2": LATENT,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": EXPERTS,
}
"""What else a model type needs to be small; None: it has no such field."""
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 32,
}
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {"gemma4": ("gemma4_text", {"vision_config": VISION})}
"""Model types with a text part: that part's type, and what there is beside it."""
SMALL_OF |= {whole: {**SMALL_OF[text], "pad_token_id": 0} for whole, (text, _) in BESIDE.items()}


class MiMoForCausalLM(Qwen2ForCausalLM):
    """transformers has none. Without its extra modules a MiMo is a qwen2, so that class is its oracle."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"model\.mtp_layers\."]  # noqa: RUF012 (transformers' own way)


AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


class KimiK2ForCausalLM(DeepseekV3ForCausalLM):
    """transformers has none, but its deepseek_v3 is the same model."""

    config_class = KimiK2Config


AutoModelForCausalLM.register(KimiK2Config, KimiK2ForCausalLM)
# Experts are saved one by one, as released files have them.
register_checkpoint_conversion_mapping("kimi_k2", get_checkpoint_conversion_mapping("deepseek_v3"))


def make(model_type: str, *, seed: int = 0, scale: float = 8.0, **changes: Any) -> Any:
    """A transformers model with random weights; `scale` multiplies matrices, so that the logits are peaked."""
    torch.manual_seed(seed)
    own = SMALL_OF.get(model_type, {})
    base = {name: value for name, value in {**SMALL, **own}.items() if value is not None or name not in own}
    # A copy, because configs write into the dictionaries that they get.
    stated = copy.deepcopy({**base, **changes})
    if model_type in BESIDE:
        text_type, beside = BESIDE[model_type]
        tied = {"tie_word_embeddings": stated["tie_word_embeddings"]}
        stated = {"text_config": {"model_type": text_type, **stated}, **tied, **copy.deepcopy(beside)}
    config = AutoConfig.for_model(model_type, **stated)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            else:
                parameter.uniform_(0.6, 1.4)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.4)
    return model


def write(directory: Path, model_type: str, *, shard: str | None = None, **options: Any) -> Path:
    """Write such a model; shard: the maximum size of a file, such as "40KB", so that there are several."""
    model = make(model_type, **options)
    model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    return directory
