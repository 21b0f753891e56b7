"""Logits of the engine against transformers', for the CPU's and the GPU's tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from stridelm import SamplingParams
from stridelm.batch import ForwardBatch, States
from stridelm.models import MODELS
from stridelm.run.eager import Logits
from support.doubles.stand import Stand

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}
SLIDING, FULL = "sliding_attention", "full_attention"
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v3": {
        "plain": {},
        "all-dense": {"first_k_dense_replace": 2},
        "all-sparse": {"first_k_dense_replace": 0, "n_shared_experts": 1},
        "no-shared-expert": {"n_shared_experts": 0},
        "one-group": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        "all-groups": {"n_group": 2, "topk_group": 2, "routed_scaling_factor": 1.0},
        "queries-without-rank": {"q_lora_rank": None},
        "queries-without-bias": {"q_lora_rank": None, "attention_bias": True},
        "halves": {"rope_interleave": False, "tie_word_embeddings": True},
        "bias": {"attention_bias": True},
        "odd-sizes": {"kv_lora_rank": 40, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 24},
        "rope-yarn": {"rope_parameters": YARN},
        "rope-yarn-mscale": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "rope-yarn-two-mscales": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
        "rope-linear-mscale": {
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0, "mscale_all_dim": 0.8}
        },
    },
    "gemma4_text": {
        "plain": {},
        "widths": {
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
            "num_hidden_layers": 5,
            "sliding_window": 7,
            "global_head_dim": 32,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": True,
        },
        "keys-as-values": {
            "attention_k_eq_v": True,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
        },
        "ropes": {
            "rope_parameters": {
                SLIDING: {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
                FULL: {"rope_type": "proportional", "factor": 2.0, "rope_theta": 5e4, "partial_rotary_factor": 0.6},
            },
            "hidden_activation": "silu",
        },
        "shared": {
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "sliding_window": 7,
            "global_head_dim": 32,
            "use_double_wide_mlp": True,
        },
        "layer-inputs": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
        "experts": {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "global_head_dim": 32,
        },
        "shared-with-inputs": {
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 4,
            "sliding_window": 9,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 70,
            "tie_word_embeddings": True,
            "final_logit_softcapping": 5.0,
        },
    },
    "glm4_moe": {
        "plain": {},
        "all-dense": {"first_k_dense_replace": 2, "attention_bias": True},
        "all-sparse": {"first_k_dense_replace": 0, "n_shared_experts": 1, "use_qk_norm": True},
        "no-shared-expert": {"n_shared_experts": 0},
        "one-group": {"n_group": 1, "topk_group": 1, "attention_bias": True, "use_qk_norm": True},
        "all-groups": {"n_group": 2, "topk_group": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
        "three-eighths": {"partial_rotary_factor": 0.375, "num_key_value_heads": 1},
        "whole-heads": {"partial_rotary_factor": 1.0, "head_dim": 24},
        "one-pair": {"partial_rotary_factor": 0.125, "use_qk_norm": True, "head_dim": 20},
        "rope-yarn": {"rope_parameters": YARN, "partial_rotary_factor": 0.75},
        "rope-llama3": {"rope_parameters": LLAMA3},
        "rope-dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    },
    "llama": {
        "plain": {},
        "one-kv-head": {"num_key_value_heads": 1},
        "as-many-kv-heads": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        "three-queries-a-head": {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 24},
        "attention-bias": {"attention_bias": True},
        "all-biases": {"attention_bias": True, "mlp_bias": True},
        "rope-llama3": {"rope_parameters": LLAMA3},
        "rope-linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
        "rope-yarn": {"rope_parameters": YARN},
        "rope-yarn-untruncated": {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}},
        "rope-yarn-mscale": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
        "rope-yarn-by-lengths": {"rope_parameters": {**YARN, "factor": None}},
        "rope-yarn-factor": {"rope_parameters": {**YARN, "attention_factor": 1.2}},
        "rope-dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        "rope-proportional": {
            "rope_parameters": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}
        },
        "gelu": {"hidden_act": "gelu"},
        "gelu-tanh": {"hidden_act": "gelu_pytorch_tanh"},
        "far-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-3},
    },
    "kimi_k2": {
        "yarn": {"rope_parameters": {**YARN, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    },
    "mimo": {
        "plain": {"rope_parameters": {"rope_type": "default", "rope_theta": 640000.0}, "rms_norm_eps": 1e-5},
        "modules-declared": {"num_nextn_predict_layers": 1},
    },
    "mistral": {
        "window": {"sliding_window": 7},
        "wide-window": {"sliding_window": 64},
        "no-window": {"sliding_window": None, "head_dim": 32},
        "gelu": {"hidden_act": "gelu", "sliding_window": 9},
    },
    "qwen2": {
        "plain": {"tie_word_embeddings": True},
        "gelu-tanh": {"hidden_act": "gelu_pytorch_tanh"},
        "some-layers-slide": {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    },
    "qwen2_moe": {
        "plain": {},
        "renormalised": {"norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 8},
        "some-layers-dense": {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        "some-layers-slide": {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3},
        "one-expert-a-row": {"num_experts_per_tok": 1, "qkv_bias": False, "hidden_act": "gelu"},
    },
    "qwen3": {
        "tied": {"tie_word_embeddings": True},
        "untied": {"head_dim": 32},
        "bias": {"attention_bias": True},
        "gelu": {"hidden_act": "gelu"},
        "some-layers-slide": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    },
    "qwen3_moe": {
        "plain": {},
        "renormalised": {"norm_topk_prob": True, "tie_word_embeddings": True},
        "some-layers-dense": {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        "all-layers-slide": {"use_sliding_window": True, "sliding_window": 5, "attention_bias": True},
        "gelu": {"hidden_act": "gelu", "num_experts": 40, "num_experts_per_tok": 5, "moe_intermediate_size": 24},
    },
}
"""Variants of each model type. One that is not listed is tested as it is."""
CLOSE = 1e-5
PROMPT, OUTPUT = 90, 12


def variants() -> list[tuple[str, str]]:
    """(model type, variant) of every registered model type."""
    return [(kind, variant) for kind in MODELS for variant in VARIANTS.get(kind, {"plain": {}})]


def options(kind: str, variant: str) -> dict[str, Any]:
    return {"scale": 3.0, **VARIANTS.get(kind, {}).get(variant, {})}


def engine_logits(stand: Stand, prompt: list[int], **settings: Any) -> tuple[list[int], torch.Tensor]:
    """(prompt and output, logits [L - 1, V] of every position as the engine ran it: chunks, then decode steps)."""
    llm = stand.llm(**settings)
    llm.engine.steps.device = llm.engine.device  # no replays, in which nothing can be heard
    heard: dict[int, torch.Tensor] = {}
    runner = llm.engine.runner
    read = runner.logits

    def listening(states: States, batch: ForwardBatch) -> Logits:
        logits = read(states, batch)
        assert batch.prompt_rows is not None and logits.prompt is not None
        for rows, values in ((batch.prompt_rows, logits.prompt), (batch.decisions, logits.decisions)):
            heard.update(zip(batch.positions[rows].tolist(), values.float().cpu()))
        return logits

    runner.logits = listening  # type: ignore[method-assign]
    output = llm.generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, prompt_logprobs=0)
    )
    ids = prompt + output[0].outputs[0].token_ids
    return ids, torch.stack([heard[position] for position in range(len(ids) - 1)])


@torch.inference_mode()
def true_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """[L - 1, V] of transformers, one forward pass over everything."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    # With hidden states asked for, transformers does not try to skip rows of layers that store nothing, which it can do
    # only if layers have inputs of their own.
    return model(torch.tensor([ids]), output_hidden_states=True).logits[0, :-1].float()


def check_model(path: Path, chunk: int, device: str = "cpu", close: float = CLOSE, **settings: Any) -> None:
    """Prefill in chunks, then decoding: every position's logits are transformers'."""
    stand = Stand(path, "float32", device, options={"drafter_model": None})
    rng = random.Random(chunk)
    prompt = [rng.randrange(stand.target.vocab_size) for _ in range(PROMPT)]
    ids, ours = engine_logits(stand, prompt, max_num_batched_tokens=chunk, **settings)
    theirs = true_logits(path, ids)
    worst = float((ours - theirs).abs().max())
    assert worst <= close * max(1.0, float(theirs.abs().max())), worst
    assert float(theirs.std()) > 0.1, "logits too flat for a meaningful comparison"
