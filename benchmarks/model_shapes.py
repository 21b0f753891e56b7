"""Shapes of published models, for benchmarks with random weights, and what vLLM does with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

EAGLE3 = "eagle@3:synthetic:2.5"
"""EAGLE-3 with three draft tokens per step, acceptance simulated at 2.5 tokens."""


@dataclass(frozen=True)
class ModelShape:
    title: str
    model_type: str
    architecture: str
    config: Mapping[str, Any]
    vllm: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Decoding -> streams -> tokens per second of vLLM 0.26.0 with the same work on one H200 (measured beside Stride,
    torch 2.11): streams times tokens per step, over the time of a step with all of them running, as here."""

    def write(self, folder: str | Path, layers: int | None = None) -> None:
        """A checkpoint of this shape without weights; layers: if not all."""
        changes = {} if layers is None else {"num_hidden_layers": layers}
        config = AutoConfig.for_model(
            self.model_type, **{**self.config, **changes, "architectures": [self.architecture]}
        )
        config.save_pretrained(folder)


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
}
"""By the name that --model takes. The first is the default."""
