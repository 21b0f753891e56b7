"""What an engine that is ready holds of a card, and that it is the same beside others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.config import EngineConfig
from stridelm.engine.start import start
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

NEIGHBOUR = """
import itertools, torch
print("ready", flush=True)
for turn in itertools.count():
    kept = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(1 + turn % 16)]
    torch.cuda.synchronize()
    del kept
    torch.cuda.empty_cache()
"""


@contextmanager
def neighbour() -> Iterator[None]:
    """Another process takes memory of the card, and returns it, without end."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def config(checkpoint: Callable[..., Path]) -> EngineConfig:
    options: dict[str, Any] = {"capture_memory": 1.0, "max_num_seqs": 16, "num_pages": 512, "skip_tokenizer_init": True}
    path = checkpoint("qwen3", tie_word_embeddings=True)
    return EngineConfig(model=str(path), dtype="bfloat16", device="cuda", drafter="ngram", depth=2, **options)


def test_a_neighbours_memory_is_not_charged(config: EngineConfig) -> None:
    """The same graphs are charged the same, whatever another process takes from the card and returns to it."""
    alone = start(config)
    with neighbour():
        beside = start(config)
    for engine in (alone, beside):
        assert engine.capture is not None and engine.stats.missing_graphs == 0
    assert alone.capture is not None and beside.capture is not None
    assert alone.capture.pool.graphs == beside.capture.pool.graphs
    assert alone.capture.pool.spent == beside.capture.pool.spent


def test_cached_memory_is_given_back(config: EngineConfig) -> None:
    """Once an engine is ready, PyTorch holds nothing that it could give back."""
    engine = start(config)
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == held
    assert engine.capture is not None


def test_few_rows_come_first(config: EngineConfig) -> None:
    """With memory for some graphs, steps of one request have theirs."""
    engine = start(replace(config, capture_memory=0.1))
    assert engine.capture is not None and engine.stats.missing_graphs > 0
    assert min(kind.rows for kind in engine.capture.kinds) == 1
