"""Shapes of published models and of a head, for benchmarks with random weights, and what vLLM does with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gemma_shapes import A4B_26B, DENSE_31B, E2B, E4B, assistant_of, fewer_layers
from safetensors.torch import save_file
from transformers import AutoConfig

EAGLE3 = "eagle@3:synthetic:2.5"
"""EAGLE-3 with three draft tokens per step, acceptance simulated at 2.5 tokens."""
DRAFT_VOCAB = 32000


@dataclass(frozen=True)
class ModelShape:
    title: str
    model_type: str
    architecture: str
    config: Mapping[str, Any]
    vllm: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Decoding -> streams -> tokens per second of vLLM 0.26.0 with the same work on one H200 (measured beside Stride,
    torch 2.11): streams times tokens per step, over the time of a step with all of them running, as here."""

    @property
    def is_mixture(self) -> bool:
        return not self.config.keys().isdisjoint({"num_experts_per_tok", "top_k_experts"})

    def write(self, folder: str | Path, layers: int | None = None) -> None:
        """A checkpoint of this shape without weights; layers: if not all."""
        changes: dict[str, Any] = {}
        if layers is not None:
            fewer = {"num_hidden_layers": layers}
            changes = fewer_layers(self.config, layers) if "layer_types" in self.config else fewer
        # Configs write into what they get.
        stated = copy.deepcopy({**self.config, **changes, "architectures": [self.architecture]})
        AutoConfig.for_model(self.model_type, **stated).save_pretrained(folder)


LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
"""In DeepSeek-V3's architecture, with its MTP module: V2 routes otherwise, at the same cost."""
SHAPES = {
    "llama-3.1-8b": ModelShape(
        "Llama-3.1-8B",
        "llama",
        "LlamaForCausalLM",
        LLAMA_8B,
        {
            "plain": {1: 203.9, 4: 796.0, 16: 2968.0, 64: 9421.0, 128: 14343.0, 256: 17853.0},
            EAGLE3: {1: 385.5, 4: 1475.0, 16: 5434.0, 64: 13825.0, 128: 16410.0, 256: 18092.0},
        },
    ),
    "qwen3-30b-a3b": ModelShape(
        "Qwen3-30B-A3B",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        QWEN3_30B_A3B,
        {"plain": {1: 244.8, 16: 1293.0, 64: 3493.0, 256: 10819.0}},
    ),
    "deepseek-v2-lite": ModelShape(
        "DeepSeek-V2-Lite",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK_V2_LITE,
        {"plain": {1: 313.2, 16: 4409.0, 64: 14737.0}},
    ),
    "gemma4-26b-a4b": ModelShape("Gemma-4-26B-A4B", "gemma4_text", "Gemma4ForCausalLM", A4B_26B),
    "gemma4-31b": ModelShape("Gemma-4-31B", "gemma4_text", "Gemma4ForCausalLM", DENSE_31B),
    "gemma4-e4b": ModelShape("Gemma-4-E4B", "gemma4_text", "Gemma4ForCausalLM", E4B),
    "gemma4-e2b": ModelShape("Gemma-4-E2B", "gemma4_text", "Gemma4ForCausalLM", E2B),
}
"""By the name that --model takes. The first is the default."""


def write_eagle3(folder: Path, layers: int, target: Mapping[str, Any] = LLAMA_8B) -> Path:
    """A head in the shape of the published heads, one dense layer like a Llama's, whose weights are not read."""
    config = {name: target[name] for name in LLAMA_8B}
    width, inner, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "fc": (width, 3 * width),
        "midlayer.input_layernorm": (width,),
        "midlayer.hidden_norm": (width,),
        "midlayer.self_attn.q_proj": (queries, 2 * width),
        "midlayer.self_attn.k_proj": (keys, 2 * width),
        "midlayer.self_attn.v_proj": (keys, 2 * width),
        "midlayer.self_attn.o_proj": (width, queries),
        "midlayer.post_attention_layernorm": (width,),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "norm": (width,),
        "lm_head": (DRAFT_VOCAB, width),
    }
    tensors = {f"{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    folder.mkdir()
    save_file({**tensors, "d2t": torch.arange(DRAFT_VOCAB) * (vocab // DRAFT_VOCAB - 1)}, folder / "model.safetensors")
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [min(2, layers - 1), layers // 2, max(layers - 3, 0)],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_assistant(folder: Path, target: Mapping[str, Any]) -> Path:
    """The published assistant of a Gemma 4 of this shape, of whose weights only the last norm is there: a directory
    without any tensor is refused, and with load_format dummy none is read. Raises ValueError for any other model."""
    config = assistant_of(target)
    folder.mkdir()
    norm = torch.ones(config["text_config"]["hidden_size"], dtype=torch.bfloat16)
    save_file({"model.norm.weight": norm}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
