"""What an engine's steps share is made once for it, and goes with it."""

from __future__ import annotations

import gc
import weakref

import torch

from stridelm.arena import RECENT, Arena
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams

CPU = torch.device("cpu")


def make(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, device=device)


def test_keeps_the_very_tensor() -> None:
    arena = Arena(CPU)
    kept = arena.keep(make, 3)
    for size in range(2 * RECENT):
        arena.keep(make, size)
    assert arena.keep(make, 3) is kept
    assert kept.tolist() == [0, 1, 2]


def test_recent_is_bounded() -> None:
    arena = Arena(CPU)
    first = weakref.ref(arena.recent(make, 0))
    for size in range(1, RECENT):
        arena.recent(make, size)
    assert arena.recent(make, 0) is first()
    for size in range(1, RECENT + 1):
        arena.recent(make, size)
    assert first() is None


def test_arenas_share_nothing() -> None:
    assert Arena(CPU).keep(make, 3) is not Arena(CPU).keep(make, 3)


def test_dies_with_its_engine() -> None:
    """Nothing beside the engine holds what its steps made: no cache of the process."""
    engine = Engine(EngineConfig(drafter="mask", depth=2))
    engine.add("a", engine.tokenizer.encode("def add(a, b):"), SamplingParams(max_tokens=8))  # type: ignore[union-attr]
    while engine.busy:
        engine.step()
    arena = engine.tokens.arena
    tensors = [weakref.ref(part) for result in arena._kept.values() for part in _tensors(result)]
    assert tensors
    del engine, arena
    gc.collect()
    assert all(tensor() is None for tensor in tensors)


def _tensors(result: object) -> list[torch.Tensor]:
    parts = [result, *vars(result).values()] if hasattr(result, "__dict__") else [result]
    return [part for part in parts if isinstance(part, torch.Tensor)]
