"""Which files' tensors are a checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stridelm.models.files import read_headers, read_tensors
from stridelm.models.loader import load_config


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


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 11421896\n"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("file", ["first.safetensors", INDEX])
def test_git_lfs_pointers(tmp_path: Path, file: str) -> None:
    """The error says what the file is and what fetches it."""
    write(tmp_path, first={"x": 1}, second={"y": 5})
    (tmp_path / file).write_text(POINTER)
    with pytest.raises(ValueError, match=rf"{file} is a Git LFS pointer .*run `git lfs pull` in {tmp_path}"):
        dict(read_headers(tmp_path))


def test_a_pointer_for_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(POINTER)
    with pytest.raises(ValueError, match=r"config\.json is a Git LFS pointer"):
        load_config(tmp_path)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_copy_in_mistral_s_format(tmp_path: Path, indexed: bool) -> None:
    """It is left out, whether or not there is an index. So are copies in folders and in other formats."""
    write(tmp_path, model={"x": 1}, consolidated={"tok_embeddings.weight": 5, "x": 3})
    write(tmp_path, **{"consolidated.00": {"y": 2}})
    (tmp_path / "original").mkdir()
    write(tmp_path / "original", model={"z": 1})
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    if indexed:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    for read in (read_headers(tmp_path), read_tensors(tmp_path, torch.device("cpu"))):
        assert [(name, len(tensor)) for name, tensor in read] == [("x", 1)]


def test_mistral_s_format_alone(tmp_path: Path) -> None:
    """The error says which files are needed."""
    write(tmp_path, consolidated={"x": 1})
    with pytest.raises(ValueError, match=r"consolidated.safetensors is in Mistral's own format; download .*model\*"):
        dict(read_headers(tmp_path))
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no config\.json.*params\.json says"):
        load_config(tmp_path)


def test_an_index_of_files_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path, first={"x": 1})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "first.safetensors", "y": "second.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks second\.safetensors, which its index names; copy the missing shards"):
        dict(read_headers(tmp_path))


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt or truncated .*copy it again"):
        dict(read_headers(tmp_path))
