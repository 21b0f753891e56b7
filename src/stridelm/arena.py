"""Tensors that depend on sizes and options alone: made once for an engine, and gone with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")

RECENT = 256
"""How many results of one function `recent` keeps."""


class Arena:
    """Results of functions that are called as `make(*sizes, device)`.

    A captured step can neither copy from the host nor read memory that was freed, so what it reads of this kind is made
    before it is captured and kept for as long as its engine lives.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[tuple[Callable[..., Any], tuple[Hashable, ...]], Any] = {}
        self._recent: dict[Callable[..., Any], Callable[..., Any]] = {}

    def keep(self, make: Callable[..., T], *sizes: Hashable) -> T:
        """What `make` returns for these sizes, for good: for sizes of which there are few."""
        key = (make, sizes)
        result: T | None = self._kept.get(key)
        if result is None:
            result = self._kept[key] = make(*sizes, self.device)
        return result

    def recent(self, make: Callable[..., T], *sizes: Hashable) -> T:
        """The same, but only the RECENT results last used are kept; a captured step holds on to its own."""
        cached = self._recent.get(make)
        if cached is None:
            cached = self._recent[make] = lru_cache(RECENT)(make)
        result: T = cached(*sizes, self.device)
        return result
