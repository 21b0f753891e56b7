"""Exports a trained model as a Hugging Face Qwen3 directory that any engine can load, and loads one for training."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stridelm.models.layers.decoder import Decoder
from stridelm.models.loader import load_config, load_model
from stridelm.models.storage import storage_of
from stridelm.train.objective import Trainable
from stridelm.train.weights import write_weights

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def export(
    model: Decoder,
    config: Any,
    out: Path,
    tokenizer_dir: Path,
    provenance: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json, model.safetensors, generation_config.json, the tokenizer and provenance.json into `out`.

    config: the transformers config that the model was built from. Fused weights are split into the
    checkpoint's names.
    """
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    write_weights(checkpoint_tensors(model, dtype), out / "model.safetensors")
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = dtype
    config.save_pretrained(out)
    GenerationConfig(eos_token_id=config.eos_token_id, do_sample=False).save_pretrained(out)
    for name in TOKENIZER_FILES:
        source = tokenizer_dir / name
        if source.is_file() and source.resolve() != (out / name).resolve():
            shutil.copyfile(source, out / name)
    (out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
    logger.info("wrote %s", out)


def checkpoint_tensors(model: Trainable, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model's weights under their Hugging Face names, contiguous, on the CPU."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: parameters[slot.name].detach()[slot.start : slot.stop].to("cpu", dtype, copy=True).contiguous()
        for name, slot in model.slots()
    }


def load_for_training(path: Path, device: torch.device | str = "cpu") -> tuple[Decoder, Any]:
    """(trainable float32 decoder, its transformers config) of a Hugging Face directory.

    Raises ValueError for a checkpoint that cannot be read, is quantised or is not a Qwen3, the only family that
    `export` writes.
    """
    config = load_config(path)
    if storage_of(config, path) is not None:
        raise ValueError(f"{path} is quantised; training starts from the checkpoint that it was quantised from")
    if config.model_type != "qwen3":
        raise ValueError(f"{path} is a {config.model_type}; training starts from a qwen3 checkpoint")
    return load_model(path, dtype=torch.float32, device=device, serving=False), config
