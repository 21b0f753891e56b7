"""The model that this package trains: a small Qwen3, so that every engine that supports Qwen3 can run the result."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from stridelm.models.layers.decoder import Decoder
from stridelm.models.qwen3 import build
from stridelm.train.settings import ModelShape


def qwen3_config(shape: ModelShape, vocab_size: int, eos_id: int, **extra: Any) -> Any:
    """A transformers `Qwen3Config`. `extra` fields (such as mask_token_id) are written into config.json unchanged."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        eos_token_id=eos_id,
        bos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        **extra,
    )


def new_model(config: Any, seed: int) -> Decoder:
    """A decoder with fresh float32 weights on the CPU, a function of config and seed only."""
    model = build(config)
    model.ropes.prepare("cpu")
    init_weights(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def init_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Initialise embeddings at 0.02, matrices at half of 1/sqrt(fan-in), which Muon soon brings to its own scale, and
    those that write into the residual stream at zero, so that every block starts as the identity."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        elif name.endswith(("mixer.o.weight", "mlp.down.weight")):
            nn.init.zeros_(parameter)
        elif name == "embed.weight":
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.normal_(0.0, 0.5 / math.sqrt(parameter.shape[1]), generator=generator)


def parameter_count(model: nn.Module) -> int:
    """Number of weights; tied ones count once."""
    return sum(p.numel() for p in model.parameters())
