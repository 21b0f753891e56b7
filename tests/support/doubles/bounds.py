"""The reference attention posing as a backend that reads lengths on the device: with it an engine on a CPU plans on
bounds and leaves a step unread, as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stridelm import LLM
from stridelm.attention import BACKENDS
from stridelm.attention.reference import ReferenceAttention
from support.doubles.stand import Stand

BOUNDS = "bounds"


class BoundsAttention(ReferenceAttention):
    reads_device = True


@dataclass
class LaggingStand(Stand):
    """Runs on bounds; the reference that it is compared with reads every verdict before it plans on."""

    def llm(self, **options: Any) -> LLM:
        return super().llm(**{"attention": BOUNDS, **options})

    @cached_property
    def _reference(self) -> LLM:
        return super().llm(attention="reference", enable_prefix_caching=False, num_pages=20)


@contextmanager
def bounds_registered() -> Iterator[None]:
    """The backend is registered while the context lasts."""
    BACKENDS.add(BOUNDS, BoundsAttention)
    try:
        yield
    finally:
        BACKENDS.remove(BOUNDS)
