"""How an engine stores KV: in the model's dtype, or in eight bits."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch

from stridelm.cache.layout import LayerState, LayerStates, in_eight_bits
from stridelm.config import EngineConfig
from stridelm.models.kv_scales import read_kv_scales
from stridelm.models.layers.decoder import Decoder
from stridelm.models.layers.fp8 import CAPABILITY

logger = logging.getLogger(__name__)


def stored_states(config: EngineConfig, states: Iterable[LayerState]) -> LayerStates:
    """Layers as this engine stores them, where no scales are known: those of drafters. Raises ValueError for a kind of
    layer that cannot be stored so."""
    return in_eight_bits(states) if config.kv_in_eight_bits else tuple(states)


def target_states(config: EngineConfig, model: Decoder, path: Path, device: torch.device) -> LayerStates:
    """The model's layers as this engine stores them, with the scales that its checkpoint has.

    Raises ValueError for a GPU without such numbers, for a kind of layer that cannot be stored so, and for scales that
    cannot be used.
    """
    states = model.layer_states
    if not config.kv_in_eight_bits:
        return states
    check_device(device)
    scales = {} if config.load_format == "dummy" else read_kv_scales(path, model)
    logger.info(
        "kv_cache_dtype fp8: %s%s",
        f"scales of {len(scales)} of {len(states)} layers from the checkpoint" if scales else "all scales are 1",
        "; on a CPU such KV is read by torch, more slowly than KV in the model's dtype" if device.type == "cpu" else "",
    )
    return in_eight_bits(states, scales)


def check_device(device: torch.device) -> None:
    """Raise ValueError for a GPU without eight-bit floats."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype 'fp8' needs a GPU of compute capability {'.'.join(map(str, CAPABILITY))} or later; leave "
            "it at 'auto', or choose another device"
        )
