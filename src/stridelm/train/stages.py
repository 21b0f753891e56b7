"""The stages from text to a mask-token model, `train_base` and `train_mask`. Each writes a checkpoint."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stridelm.train.base import BaseObjective
from stridelm.train.export import export, load_for_training
from stridelm.train.mask import MaskObjective
from stridelm.train.prepare import Prepared, data_facts, on_device
from stridelm.train.recipe import new_model, parameter_count, qwen3_config
from stridelm.train.record import provenance
from stridelm.train.settings import BaseSettings, MaskSettings, ModelShape, OptimSettings, RunSettings
from stridelm.train.trainer import Result, Trainer
from stridelm.train.windows import fixed_windows, text_windows

logger = logging.getLogger(__name__)

WORK = "run"
"""Folder inside --out for files that are not part of the checkpoint: state, log, token files."""


def pick_device(name: str) -> torch.device:
    """The torch device called `name`; "auto" is CUDA if available."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        # cuDNN's masked backward requires layouts that differ between versions; the other kernels do not.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def train_base(
    out: Path, data: Prepared, shape: ModelShape, base: BaseSettings, run: RunSettings, optim: OptimSettings
) -> Result:
    """Train a new model on next tokens and export the best checkpoint to `out`."""
    device, compile = place(run)
    _check_context(run, shape.context)
    config = qwen3_config(shape, data.train.info.vocab_size, data.eos_id)
    model = new_model(config, run.seed).to(device)
    logger.info(
        "base: %.2fM parameters, %d training tokens, %s",
        parameter_count(model) / 1e6,
        len(data.train),
        device,
    )
    valid = fixed_windows(on_device(data.valid, device), run.length, run.eval_tokens)
    objective = BaseObjective(model, valid, data.mask_id, base, seed=run.seed, compile=compile)
    trainer = Trainer("base", objective, text_windows(on_device(data.train, device), run), run, optim, out / WORK)
    result = trainer.train()
    facts = {"parameters": parameter_count(model), "data": data_facts(data), "result": asdict(result)}
    record = provenance("base", device, shape, base, run, optim, seed=run.seed, **facts)
    export(model, config, out, data.tokenizer_dir, record)
    return result


def train_mask(
    out: Path, checkpoint: Path, data: Prepared, mask: MaskSettings, run: RunSettings, optim: OptimSettings
) -> Result:
    """Teach the model in `checkpoint` to read masks, by distillation from a frozen copy of itself, and export it to
    `out`."""
    device, compile = place(run)
    student, config = load_for_training(checkpoint, device)
    _check_fit(config, data, checkpoint)
    _check_context(run, config.max_position_embeddings)
    teacher = copy.deepcopy(student)
    with torch.no_grad():
        # Base training only ever pushed the mask's row away; start it at the average token.
        student.embed.weight[data.mask_id] = student.embed.weight.mean(0)
    valid = fixed_windows(on_device(data.valid, device), run.length, run.eval_tokens)
    objective = MaskObjective(student, teacher, valid, data.mask_id, mask, seed=run.seed, compile=compile)
    logger.info("mask: base loss %.4f on %d validation tokens", objective.base_loss, valid[:, 1:].numel())
    trainer = Trainer("mask", objective, text_windows(on_device(data.train, device), run), run, optim, out / WORK)
    result = trainer.train()
    config.mask_token_id, config.mask_k_max = data.mask_id, mask.k_max
    facts: dict[str, Any] = {"parameters": parameter_count(student), "base": _base_record(checkpoint)}
    facts |= {"data": data_facts(data), "result": asdict(result)}
    export(
        student,
        config,
        out,
        data.tokenizer_dir,
        provenance("mask", device, mask, run, optim, seed=run.seed, **facts),
    )
    return result


def place(run: RunSettings) -> tuple[torch.device, bool]:
    """(device, whether to compile)."""
    device = pick_device(run.device)
    return device, device.type == "cuda" if run.compile is None else run.compile


def _check_context(run: RunSettings, context: int) -> None:
    if max(run.length, run.short_length) > context:
        raise ValueError(f"--length {run.length} exceeds the model's context of {context}; lower it")


def _check_fit(config: Any, data: Prepared, checkpoint: Path) -> None:
    if config.vocab_size != data.train.info.vocab_size:
        raise ValueError(
            f"{checkpoint} has a vocabulary of {config.vocab_size} tokens, "
            f"the data was written with {data.train.info.vocab_size}; "
            f"encode it with the checkpoint's own tokenizer (--tokenizer {checkpoint})"
        )


def _base_record(checkpoint: Path) -> dict[str, Any]:
    """The provenance of the checkpoint that the student started from, in full if it has one."""
    file = checkpoint / "provenance.json"
    return {"name": checkpoint.name, "provenance": json.loads(file.read_text()) if file.is_file() else None}
