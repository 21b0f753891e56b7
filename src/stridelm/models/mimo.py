"""`MiMoForCausalLM`: a qwen2 whose checkpoints include MTP modules."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, Qwen2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields, dense_layers


class MiMoConfig(Qwen2Config):
    """transformers has no such class: the released checkpoints ship it as remote code, which is not run here."""

    model_type = "mimo"
    num_nextn_predict_layers: int = 0


if MiMoConfig.model_type not in CONFIG_MAPPING:
    AutoConfig.register(MiMoConfig.model_type, MiMoConfig)


def build(config: Any) -> Decoder:
    """A decoder shaped by a `MiMoConfig`, weights not yet loaded."""
    return Decoder(DecoderSpec(**common_fields(config), layers=dense_layers(config, qkv_bias=True)))
