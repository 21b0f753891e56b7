"""A tiny model, a tiny text and the settings of a run that takes a second."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stridelm.models.layers.decoder import Decoder
from stridelm.train.recipe import new_model, qwen3_config
from stridelm.train.settings import ModelShape, RunSettings
from stridelm.train.tokens import TokenFile, TokenFileInfo

# Models this small are all hand-over: on a busy machine two threads are ten times slower than one.
torch.set_num_threads(1)

VOCAB, MASK_ID = 64, 63


UMASK = 0o027
"""Neither what a temporary file has nor what most machines say."""


@pytest.fixture(autouse=True)
def modes(tmp_path: Path) -> Iterator[None]:
    """Every file that a test leaves in its folder has the mode that the umask implies, whatever wrote it: a model
    trained under one account is served under another."""
    previous = os.umask(UMASK)
    yield
    os.umask(previous)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    wrong = {str(path): oct(path.stat().st_mode) for path in files if path.stat().st_mode & 0o777 != 0o666 & ~UMASK}
    assert not wrong


@pytest.fixture
def shape() -> ModelShape:
    return ModelShape(hidden=24, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=32, context=64)


@pytest.fixture
def config(shape: ModelShape) -> Any:
    return qwen3_config(shape, VOCAB, 0)


@pytest.fixture
def tiny_model(config: Any) -> Decoder:
    return new_model(config, seed=0)


@pytest.fixture
def stream() -> torch.Tensor:
    """A text with something to learn: runs of counting from random starts."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 60, (200, 1), generator=generator)
    return ((starts + torch.arange(16)) % 60).flatten().int()


@pytest.fixture
def run_settings() -> RunSettings:
    run = RunSettings(steps=12, batch_tokens=128, length=16, eval_steps=4, eval_tokens=256, log_steps=2)
    return replace(run, device="cpu", compile=False)


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[..., TokenFile]:
    """token_file("train", 200): a token file of that name, of random tokens of the tiny vocabulary."""

    def write(name: str, tokens: int, vocab: int = VOCAB, folder: Path = tmp_path) -> TokenFile:
        ids = np.random.default_rng(len(name)).integers(3, 60, tokens).astype("<u2")
        ids.tofile(folder / f"{name}.bin")
        info = TokenFileInfo(tokens, 1, tokens, "uint16", 0, vocab, "none")
        (folder / f"{name}.json").write_text(json.dumps(asdict(info)))
        return TokenFile(folder / f"{name}.bin")

    return write
