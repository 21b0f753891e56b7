"""Attention over pages on a CPU in bfloat16 or float32, by a compiled kernel. Other dtypes go to the reference."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend, HeadsMixer
from stridelm.attention.reference import ReferenceHeads
from stridelm.cache.layout import HeadsKV
from stridelm.cache.pages import padded_tables
from stridelm.kernels.host.arithmetic import DTYPES, array, follow_torch
from stridelm.kernels.host.attention import attend
from stridelm.types import DeviceGeometry, Geometry

TILE_QUERIES = 48
"""Most query vectors in a tile. They share what is read of the pool; more would not fit the second-level cache beside
it."""


class HostHeads(HeadsMixer):
    def __init__(self, backend: AttentionBackend, geometry: Geometry | DeviceGeometry) -> None:
        assert isinstance(geometry, Geometry)
        follow_torch()
        self._backend, self.geometry = backend, geometry
        self._slots = {group: _slots(tables, geometry.page_size) for group, tables in geometry.page_tables.items()}
        self._tiles: dict[int, np.ndarray[Any, Any]] = {}
        bases = np.repeat(np.add(geometry.starts, geometry.reals), geometry.counts)
        draft = array(geometry.draft_rows)
        self._bases = bases
        self._limits = np.where(draft < 0, array(geometry.positions) + 1, bases)
        self._ancestors = array(geometry.ancestors)
        self._fallback: ReferenceHeads | None = None

    def attend(
        self, state: HeadsKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        if q_NHD.dtype not in DTYPES:
            return self._reference().attend(state, q_NHD, keys_PGD, values_PGD)
        out = torch.empty_like(q_NHD)
        attend(
            array(q_NHD),
            array(keys_PGD),
            array(values_PGD),
            self._slots[state.group],
            self._tiles_of(state.heads // state.kv_heads),
            self._limits,
            self._bases,
            self._ancestors,
            sys.maxsize if state.window is None else state.window,
            np.float32(state.scale),
            array(out),
        )
        return out

    def _tiles_of(self, shared: int) -> np.ndarray[Any, Any]:
        if shared not in self._tiles:
            self._tiles[shared] = _tiles(self.geometry.counts, max(1, TILE_QUERIES // shared))
        return self._tiles[shared]

    def _reference(self) -> ReferenceHeads:
        if self._fallback is None:
            self._fallback = ReferenceHeads(self._backend, self.geometry)
        return self._fallback


class HostAttention(AttentionBackend):
    """Deterministic whether asked for or not."""

    device = "cpu"
    mixers: ClassVar = {HeadsKV: HostHeads}

    def __init__(self, deterministic: bool = True) -> None:
        super().__init__(True)


def _slots(tables: list[list[int]], page_size: int) -> np.ndarray[Any, Any]:
    """[R, L] pool slot of every storage entry; behind a request's own pages stands the null slot."""
    return (padded_tables(tables)[:, :, None] * page_size + np.arange(page_size)).reshape(len(tables), -1)


def _tiles(counts: list[int], most: int) -> np.ndarray[Any, Any]:
    """[T, 3] (span, first row, rows): each span's rows in runs of at most `most`."""
    tiles, row = [], 0
    for span, count in enumerate(counts):
        tiles += [(span, row + first, min(most, count - first)) for first in range(0, count, most)]
        row += count
    return np.array(tiles, dtype=np.int64)
