"""Which files' tensors are a checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stridelm.models.files import read_headers, read_tensors


def write(path: Path, **files: dict[str, int]) -> None:
    """Files of weights; each tensor is as long as the number given for it."""
    for name, tensors in files.items():
        save_file({tensor: torch.ones(length) for tensor, length in tensors.items()}, path / f"{name}.safetensors")


def test_an_index_decides_between_two_files(tmp_path: Path) -> None:
    write(tmp_path, first={"x": 1, "y": 2}, second={"x": 5, "z": 3}, third={"z": 7})
    places = {"x": "first.safetensors", "y": "first.safetensors", "z": "second.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for read in (read_headers(tmp_path), read_tensors(tmp_path, torch.device("cpu"))):
        assert sorted((name, len(tensor)) for name, tensor in read) == [("x", 1), ("y", 2), ("z", 3)]


def test_without_an_index_no_file_decides(tmp_path: Path) -> None:
    write(tmp_path, first={"x": 1}, second={"x": 5})
    with pytest.raises(ValueError, match=r"first.safetensors and .*second.safetensors both store x; keep the model's"):
        dict(read_headers(tmp_path))
