"""`MistralForCausalLM`: llama without biases, every layer looking back over `sliding_window` tokens if it is set."""

from __future__ import annotations

from typing import Any

from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields


def build(config: Any) -> Decoder:
    """A decoder shaped by a transformers `MistralConfig`, weights not yet loaded."""
    fields = common_fields(config)
    fields["windows"] = (getattr(config, "sliding_window", None),) * fields["num_layers"]
    return Decoder(DecoderSpec(**fields))
