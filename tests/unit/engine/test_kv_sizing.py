"""How much KV an engine gets: what weights and the largest step leave of memory, and no more than is useful."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import LLM
from stridelm.cache.layout import HeadsKV
from stridelm.cache.pool import MemoryBudget
from stridelm.config import EngineConfig
from stridelm.engine import load
from stridelm.engine.load import peak_activations, run_rows
from stridelm.engine.memory import GPU_MARGIN, count_pages, largest_step
from stridelm.models.layers.decoder import Decoder
from stridelm.models.loader import load_model

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
LAYOUT = (HeadsKV.of(2, 2, 8, group="main"),)
PAGE_BYTES = 16 * 2 * 2 * 8 * 4
MIB = 2**20


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Decoder:
    return load_model(checkpoint("qwen3"), dtype=torch.float32)


def pages(room: MemoryBudget, max_length: int = 256, **options: Any) -> int:
    """Pages of 16 tokens of LAYOUT in float32."""
    found, most = count_pages(EngineConfig(**options), LAYOUT, max_length, torch.float32, room)
    assert found.keys() == {"main"} and found == most
    return found["main"]


# The largest step


@pytest.mark.parametrize(
    ("seqs", "tokens", "length", "expected"),
    [
        (32, 1024, 4096, (1024, 1024)),
        (4, 1024, 4096, (1024, 260)),
        (1, 1024, 4096, (1024, 65)),
        (2, 100_000, 200, (528, 130)),
    ],
)
def test_largest_step(seqs: int, tokens: int, length: int, expected: tuple[int, int]) -> None:
    """No more rows than the budget, nor than all requests have together; of each, the last real row and 64 draft rows
    decide."""
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    assert largest_step(config, length) == expected


def test_the_measured_step_is_a_step(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer runs on all rows, and the deciding ones have finite logits."""
    rows: list[int] = []
    gate = type(model.ops).gate

    def counting(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(x.shape[0])
        return gate(self, x, *rest)

    monkeypatch.setattr(type(model.ops), "gate", counting)
    logits = run_rows(model, 37, 5)
    assert logits.shape == (5, 64)
    assert bool(logits.isfinite().all())
    assert rows == [37, 37]


def test_the_measured_step_has_latent_rows(checkpoint: Callable[..., Path]) -> None:
    """The same for layers that keep latents, whose values are as wide as a latent for every head."""
    latent = load_model(checkpoint("deepseek_v3"))
    logits = run_rows(latent, 37, 5)
    assert logits.shape == (5, 64) and bool(logits.isfinite().all())


class FakeCuda:
    """A GPU allocator's counters: bytes allocated now, and at the peak since the last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: int, peak: int) -> None:
        self.now, self.peak, self.was_reset = now, peak, False
        monkeypatch.setattr(load, "free_memory", lambda device: 7 * MIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak if self.was_reset else -1)

    def reset(self, device: torch.device) -> None:
        self.was_reset = True


def test_the_peak_is_what_a_step_adds(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the peak beyond what was allocated before; on a CPU nothing is run and nothing reserved."""
    FakeCuda(monkeypatch, now=1000, peak=1234)
    assert peak_activations(model, 37, 5, GPU) == 234
    monkeypatch.setattr(load, "run_rows", lambda *args: pytest.fail("a step was run"))
    assert peak_activations(model, 37, 5, CPU) == 0


def test_a_step_that_does_not_fit(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, now=0, peak=0)

    def run_out(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(load, "run_rows", run_out)
    with pytest.raises(ValueError, match=r"37 rows .* 7\.0 MiB .* cuda:1; lower max_num_batched_tokens"):
        peak_activations(model, 37, 5, GPU)


# Pages


def test_the_fraction_is_of_what_a_step_leaves() -> None:
    """By default nine tenths on a GPU and a quarter on a CPU."""
    plenty = {"max_num_seqs": 1000, "max_num_batched_tokens": 8192}
    assert pages(MemoryBudget(GPU, 5 * MIB, MIB), **plenty) == int(4 * MIB * 0.9) // PAGE_BYTES
    assert pages(MemoryBudget(CPU, 4 * MIB), **plenty) == MIB // PAGE_BYTES
    assert pages(MemoryBudget(GPU, 5 * MIB, MIB), kv_memory_fraction=0.5, **plenty) == 2 * MIB // PAGE_BYTES


def test_a_margin_is_enough_on_a_large_gpu() -> None:
    """What fragments, and what libraries take, does not grow with the card. A fraction that was given is one."""
    huge: dict[str, Any] = {"max_length": 2**40, "max_num_seqs": 1000}
    for left in (20 << 30, 100 << 30):
        room = MemoryBudget(GPU, left + MIB, MIB)
        assert pages(room, **huge) == max(int(0.9 * left), left - GPU_MARGIN) // PAGE_BYTES
        assert pages(room, kv_memory_fraction=0.9, **huge) == int(0.9 * left) // PAGE_BYTES
    assert 0.9 * left < left - GPU_MARGIN


def test_no_more_pages_than_are_of_use() -> None:
    """Every request at its maximum length, followed by a draft."""
    assert pages(MemoryBudget(GPU, 2**40, MIB), max_num_seqs=3) == 3 * (256 + 64) // 16


def test_pages_asked_for_leave_room_for_a_step() -> None:
    asked = MIB // PAGE_BYTES
    assert pages(MemoryBudget(GPU, 2 * MIB, MIB), num_pages=asked) == asked
    with pytest.raises(ValueError, match=r"1\.0 MiB are missing; lower num_pages, lower max_num_batched_tokens"):
        pages(MemoryBudget(GPU, 2 * MIB, MIB), num_pages=2 * asked)


def test_a_pool_without_room_for_a_context_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The warning says how long a context fits; the engine still serves shorter ones."""
    assert pages(MemoryBudget(CPU, MIB), num_pages=16) == 16
    assert not caplog.records
    assert pages(MemoryBudget(CPU, MIB), num_pages=15) == 15
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "240 tokens, but a context may have 256" in record.getMessage()
    assert "raise num_pages" in record.getMessage()
    assert pages(MemoryBudget(CPU, 2 * 15 * PAGE_BYTES), kv_memory_fraction=0.5) == 15
    assert "free memory" in caplog.records[-1].getMessage()


# Together


@pytest.fixture
def sized(speaking: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """sized(activations): an engine on 64 MiB of free memory, whose largest step takes that many bytes."""

    def build(activations: int) -> LLM:
        monkeypatch.setattr(load, "free_memory", lambda device: 64 * MIB)
        monkeypatch.setattr(load, "peak_activations", lambda *args: activations)
        return LLM(
            speaking, dtype="float32", device="cpu", drafter="none", max_num_seqs=10_000, kv_memory_fraction=0.25
        )

    return build


def test_an_engine_is_sized_by_what_is_left(sized: Callable[..., LLM], caplog: pytest.LogCaptureFixture) -> None:
    """The pool is the fraction of what a step leaves, and one log line says how memory is used."""
    caplog.set_level(logging.INFO, "stridelm.engine.load")
    page = 16 * 2 * 2 * 2 * 16 * 4  # tokens, keys and values, layers, heads, width, float32
    assert sized(0).engine.loaded.pages == {"full": 16 * MIB // page}
    assert sized(32 * MIB).engine.loaded.pages == {"full": 8 * MIB // page}
    line = next(r.getMessage() for r in reversed(caplog.records) if "weights" in r.getMessage())
    assert "KV 8.0 MiB" in line
    assert f"{8 * MIB // page}" in line
