"""The memory of captured steps is counted without a GPU's other tenants."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stridelm.run.graphs import DRIVERS_SHARE, GraphPool

MIB = 1 << 20


class Card:
    """A card of which torch reserves memory in this process, and others take some too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved, self.others = 20 << 30, 0
        stream = SimpleNamespace(wait_stream=lambda _: None)
        answers: dict[str, Any] = {
            "Stream": lambda _: stream,
            "current_stream": lambda: stream,
            "stream": lambda _: nullcontext(),
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "CUDAGraph": object,
            "graph": lambda *_, **__: nullcontext(),
            "graph_pool_handle": object,
            "memory_reserved": lambda _: self.reserved,
            "mem_get_info": lambda _: ((80 << 30) - self.reserved - self.others, 80 << 30),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def step(self, own: int, others: int) -> None:
        """A step that takes memory, while others take some, or give it back."""
        self.reserved += own
        self.others += others


@pytest.mark.parametrize("others", [0, 8 << 30, -(8 << 30)])
@pytest.mark.parametrize("own", [0, 5 * MIB])
def test_own_memory_alone_counts(own: int, others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch reserves while a step is captured, with a share for the driver; the step runs twice, and the first
    time does not count. Nor does what other processes take from the card or return to it."""
    card, pool = Card(monkeypatch), GraphPool(1 << 30, torch.device("cuda"))
    assert pool.capture(lambda: card.step(own, others)) is not None
    assert pool.spent == own + DRIVERS_SHARE
    assert pool.capture(lambda: None, inputs=MIB) is not None
    assert pool.spent == own + MIB + 2 * DRIVERS_SHARE and pool.graphs == 2


def test_the_budget_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once it is spent nothing is captured, which is told once; a pool that is cleared has all of it again."""
    card, pool = Card(monkeypatch), GraphPool(20 * MIB, torch.device("cuda"))
    assert pool.capture(lambda: card.step(15 * MIB, 0)) is not None
    for _ in range(2):
        assert pool.capture(lambda: pytest.fail("the step ran")) is None
    assert len(caplog.records) == 1 and "1 graphs" in caplog.text
    pool.clear()
    assert pool.spent == pool.graphs == 0 and pool.capture(lambda: None) is not None


def test_memory_is_short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A step that finds no memory is not captured, nor is any after it."""

    def run_out() -> None:
        raise torch.OutOfMemoryError

    Card(monkeypatch)
    pool = GraphPool(20 * MIB, torch.device("cuda"))
    assert pool.capture(run_out) is None and pool.capture(lambda: None) is None
    assert len(caplog.records) == 1 and pool.graphs == 0
