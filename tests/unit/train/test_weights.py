"""Weights on disk: written whole or not at all, with the mode that the umask implies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from stridelm.train.weights import write_weights

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077], ids=oct)
def test_the_umask_says_who_may_read_them(umask: int, folder: Path) -> None:
    """Like any file that a program writes, whether one existed before or not; nothing else is left behind."""
    path = folder / "model.safetensors"
    previous = os.umask(umask)
    try:
        for _ in range(2):
            write_weights(TENSORS, path)
            assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(previous)
    assert [one.name for one in folder.iterdir()] == [path.name]
    read = safetensors.torch.load_file(path)
    assert set(read) == set(TENSORS) and all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)


def test_an_interrupted_write_leaves_the_previous_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.safetensors"
    write_weights(TENSORS, path)

    def full(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        write_weights({}, path)
    assert set(safetensors.torch.load_file(path)) == set(TENSORS)
