"""Kimi-K2: a deepseek_v3 of other sizes, under a name of its own."""

from __future__ import annotations

from transformers import AutoConfig, DeepseekV3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stridelm.models.deepseek_v3 import build

__all__ = ["KimiK2Config", "build"]


class KimiK2Config(DeepseekV3Config):
    """transformers has no such class: the released checkpoints ship it as remote code, which is not run here."""

    model_type = "kimi_k2"


if KimiK2Config.model_type not in CONFIG_MAPPING:
    AutoConfig.register(KimiK2Config.model_type, KimiK2Config)
