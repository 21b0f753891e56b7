"""What is compiled is counted, and index kernels are compiled for all sizes at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from triton import knobs

from stridelm.kernels import compilations


def test_counts_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what Triton finds on disk; another listener still hears of both."""
    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: heard.append(event))
    monkeypatch.setattr(compilations, "_is_watching", False)
    compilations.watch()
    compilations.watch()
    before, kernel = compilations.count(), SimpleNamespace(name="attend")
    for is_found in (True, False, True):
        knobs.compilation.listener(src=kernel, metadata={}, metadata_group={}, times=None, cache_hit=is_found)
    assert compilations.count() == before + 1
    assert [event["cache_hit"] for event in heard] == [True, False, True]
