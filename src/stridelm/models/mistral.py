"""`MistralForCausalLM`: llama without biases; every layer attends to `sliding_window` tokens if that is set."""

from __future__ import annotations

from typing import Any

from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields, dense_layers


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `MistralConfig`, weights not yet loaded."""
    sees = (getattr(config, "sliding_window", None),) * config.num_hidden_layers
    return Decoder(DecoderSpec(**common_fields(config), layers=dense_layers(config, sees=sees)))
