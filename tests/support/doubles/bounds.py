"""The reference behind the face of a backend that reads lengths on the device: with it an engine on a CPU plans on
bounds and leaves a step unread, as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from stridelm import LLM
from stridelm.attention import BACKENDS
from stridelm.attention.base import AttentionBackend
from stridelm.attention.reference import ReferenceAttention, ReferenceHeads
from stridelm.cache.layout import HeadsKV
from stridelm.types import DeviceGeometry, Geometry
from support.doubles.stand import Stand

BOUNDS = "bounds"


class BoundsHeads(ReferenceHeads):
    def __init__(self, backend: AttentionBackend, geometry: Geometry | DeviceGeometry) -> None:
        assert isinstance(geometry, DeviceGeometry)
        bases = (geometry.starts + geometry.reals).repeat_interleave(torch.tensor(geometry.bounds))
        drafted = geometry.draft_rows >= 0
        path_in_place = (torch.ones_like(geometry.ancestors) << (geometry.positions - bases + 1)) - 1
        ordered = drafted & (geometry.ancestors != 0) & (geometry.ancestors != path_in_place)
        host = Geometry(
            counts=list(geometry.bounds),
            starts=geometry.starts.tolist(),
            reals=geometry.reals.tolist(),
            draft_rows=torch.where(drafted, geometry.draft_rows, -1),
            ancestors=geometry.ancestors,
            positions=geometry.positions,
            ordered=ordered,
            page_tables={group: tables.tolist() for group, tables in geometry.tables.items()},
            page_size=geometry.page_size,
            has_ordered=not geometry.is_chain,
        )
        super().__init__(backend, host)


class BoundsAttention(ReferenceAttention):
    reads_device = True
    mixers: ClassVar = {HeadsKV: BoundsHeads}


@dataclass
class LaggingStand(Stand):
    """Runs on bounds; what it is held against reads every verdict before it plans on."""

    def llm(self, **options: Any) -> LLM:
        return super().llm(**{"attention": BOUNDS, **options})

    @cached_property
    def _reference(self) -> LLM:
        return super().llm(attention="reference", enable_prefix_caching=False, num_pages=20)


@contextmanager
def bounds_registered() -> Iterator[None]:
    """The backend is to be had by its name."""
    BACKENDS.add(BOUNDS, BoundsAttention)
    try:
        yield
    finally:
        BACKENDS.remove(BOUNDS)
