"""Writes weights atomically, with the permissions that the umask gives.

safetensors itself writes a temporary file that only its owner can read, and renames it: a server under another account
could not read what was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch


def write_weights(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the mode of any new file. An interrupted write leaves the previous file."""
    from safetensors.torch import save_file

    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    partial.touch()
    mode = partial.stat().st_mode
    save_file(dict(tensors), partial, metadata={"format": "pt"})
    partial.chmod(mode)
    partial.replace(path)
