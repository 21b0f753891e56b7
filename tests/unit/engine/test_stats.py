"""Counters that several parts of the engine hold on to."""

from __future__ import annotations

from dataclasses import fields

from stridelm.engine.stats import EngineStats


def test_reset_is_in_place_and_whole() -> None:
    stats, other = EngineStats(), EngineStats()
    for each in fields(EngineStats):
        setattr(stats, each.name, {"prompt": 1} if isinstance(getattr(other, each.name), dict) else 7)
    stats.reset()
    assert stats == other
    stats.uncaptured["prompt"] = 1
    assert not other.uncaptured and not EngineStats().uncaptured
