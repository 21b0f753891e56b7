"""Attention over pages on a CPU in bfloat16 or float32, by a compiled kernel. Other dtypes go to the reference."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend, Entries, HeadsMixer
from stridelm.attention.reference import ReferenceHeads
from stridelm.cache.layout import HeadsKV
from stridelm.kernels.host.arithmetic import DTYPES, follow_torch
from stridelm.kernels.host.attention import attend
from stridelm.kernels.host.geometry import pool_slots, reach, tiles
from stridelm.kernels.host.layer import layer
from stridelm.kernels.host.memory import array
from stridelm.types import Geometry

TILE_QUERIES = 48
"""Most query vectors in a tile. They share the keys and values read from the pool; more of them would not fit into the
second-level cache beside those."""


class HostHeads(HeadsMixer):
    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        follow_torch()
        self._backend, self._geometry = backend, geometry
        tables = {group: array(pages.contiguous()) for group, pages in geometry.tables.items()}
        self._slots = {group: pool_slots(pages, geometry.page_size) for group, pages in tables.items()}
        self._firsts, self._rows = array(geometry.firsts), geometry.positions.shape[0]
        self._tiles: dict[int, np.ndarray[Any, Any]] = {}
        self._ancestors = array(geometry.ancestors)
        spans = (self._firsts, array(geometry.starts), array(geometry.reals))
        self._bases, self._limits = reach(*spans, array(geometry.draft_rows), array(geometry.positions))
        self._fallback: ReferenceHeads | None = None

    def attend(
        self, state: HeadsKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        if q_NHD.dtype not in DTYPES:
            return self._reference().attend(state, q_NHD, keys_PGD, values_PGD)
        out = torch.empty_like(q_NHD)
        attend(array(q_NHD), array(keys_PGD), array(values_PGD), *self._seen(state), array(out))
        return out

    def run_layer(self, state: HeadsKV, entries: Entries, slots_N: torch.Tensor, arguments: tuple[Any, ...]) -> bool:
        stored = array(entries["keys"]), array(entries["values"]), array(slots_N)
        layer(*arguments, *stored, *self._seen(state))
        return True

    def _seen(self, state: HeadsKV) -> tuple[Any, ...]:
        """What each row sees, as `attend` takes it."""
        return (
            self._slots[state.group],
            self._tiles_of(state.heads // state.kv_heads),
            self._limits,
            self._bases,
            self._ancestors,
            sys.maxsize if state.window is None else state.window,
            np.float32(state.scale),
        )

    def _tiles_of(self, shared: int) -> np.ndarray[Any, Any]:
        if shared not in self._tiles:
            self._tiles[shared] = tiles(self._firsts, self._rows, max(1, TILE_QUERIES // shared))
        return self._tiles[shared]

    def _reference(self) -> ReferenceHeads:
        if self._fallback is None:
            self._fallback = ReferenceHeads(self._backend, self._geometry)
        return self._fallback


class HostAttention(AttentionBackend):
    """Always deterministic."""

    device = "cpu"
    mixers: ClassVar = {HeadsKV: HostHeads}

    def __init__(self, deterministic: bool = True) -> None:
        super().__init__(True)
