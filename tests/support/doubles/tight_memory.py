"""Engines whose page groups share little memory, and re-splits that nothing asked for."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stridelm import LLM
from stridelm.cache.ledger import Ledger
from stridelm.cache.pool import MemoryBudget, PagePool
from stridelm.engine import load
from stridelm.engine.engine import Engine
from support.doubles.stand import Stand


def tight(stand: Stand, kv_bytes: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    """An engine whose KV has so many bytes, of which groups get what they can use."""
    with monkeypatch.context() as patch:
        patch.setattr(load, "MemoryBudget", lambda device, *sizes: MemoryBudget(device, kv_bytes))
        llm = stand.llm(num_pages=None, kv_memory_fraction=1.0, **options)
    assert llm.engine.loaded.pool.most is not None, "all that is of use fits"
    return llm


def force(engine: Engine, rng: random.Random) -> bool:
    """Move a random part of what one group has available to another. Returns whether pages moved."""
    engine.steps.land_all()
    pool, counts = engine.loaded.pool, engine.ledger.counts()
    totals = random_totals(pool, engine.ledger, rng)
    moved = any(counts[group]["total"] != total for group, total in totals.items())
    engine.resplit.apply(totals)
    assert pool.bytes_at(pool.pages) <= pool.budget
    assert pool.pages == {group: c["total"] for group, c in engine.ledger.counts().items()}
    engine.check()
    return moved


def random_totals(pool: PagePool, ledger: Ledger, rng: random.Random) -> dict[str, int]:
    """Pages of two groups, of which one loses some that it has available, and the other gets what then fits."""
    counts = ledger.counts()
    assert pool.most is not None
    donor, taker = rng.sample(sorted(counts), 2)
    totals = {group: counts[group]["total"] for group in counts}
    available = counts[donor]["free"] + counts[donor]["cached"]
    totals[donor] -= rng.randint(0, min(available, totals[donor] - 1))
    sizes = range(totals[taker] + 1, pool.most[taker] + 1)
    totals[taker] += bisect_right(sizes, pool.budget, key=lambda total: pool.bytes_at({**totals, taker: total}))
    return totals


@contextmanager
def forced(engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Before every other step or so, memory moves. Yields whether pages moved, each time."""
    rng, step, moved = random.Random(seed), engine.step, []

    def stepping() -> Any:
        if rng.random() < 0.5:
            moved.append(force(engine, rng))
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", stepping)
        yield moved
