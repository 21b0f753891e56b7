"""Copies of checkpoints, changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def copied(path: Path, target: Path) -> Path:
    shutil.copytree(path, target, dirs_exist_ok=True)
    return target


def rewritten(path: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a checkpoint with its tensors changed."""
    copied(path, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
