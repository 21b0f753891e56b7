"""Writes a Qwen3 checkpoint as a GGUF file without a tokenizer: the same weights for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stridelm.models.files import read_tensors

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(checkpoint: Path, file: Path) -> Path:
    """Matrices keep their dtype, bfloat16 or float32; vectors become float32, as llama.cpp wants them, which changes
    no value. Raises ValueError for another architecture, and SystemExit if the package `gguf` is not installed."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "qwen3":
        raise ValueError(f"{checkpoint} is a {config['model_type']} model; this writes qwen3 only")
    try:
        import gguf
    except ImportError:
        raise SystemExit("GGUF files are written by the package gguf: pip install 'stridelm[gguf]'") from None
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in read_tensors(checkpoint, torch.device("cpu")):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if tensor.dtype == torch.bfloat16 and tensor.dim() > 1:
            data = tensor.view(torch.int16).numpy().view(np.uint8)
            writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rope_theta(config: dict[str, Any]) -> float:
    """Newer checkpoints have it among the parameters of their rotary positions."""
    return float(config.get("rope_parameters", config)["rope_theta"])


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` as `blk.3.ffn_up.weight`. Raises KeyError for a tensor it does not know."""
    path = name.removesuffix(".weight")
    if not path.startswith("model.layers."):
        return f"{NAMES[path]}.weight"
    _, _, layer, rest = path.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"
