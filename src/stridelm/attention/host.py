"""Attention over pages on a CPU in bfloat16 or float32, by a compiled kernel. Other dtypes go to the reference."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import numpy as np
import torch

from stridelm.attention.base import PreparedAttention
from stridelm.attention.reference import ReferenceAttention
from stridelm.cache.pages import padded_tables
from stridelm.kernels.host.arithmetic import DTYPES, array, follow_torch
from stridelm.kernels.host.attention import attend
from stridelm.models.layers.decoder import LayerKV
from stridelm.types import DeviceGeometry, Geometry

TILE_QUERIES = 48
"""Most query vectors in a tile. They share what is read of the pool; more would not fit the second-level cache beside
it."""


class HostAttention:
    device: ClassVar[str | None] = "cpu"
    reads_device: ClassVar[bool] = False

    def __init__(self, deterministic: bool = True) -> None:
        """Deterministic whether asked for or not."""

    def check(self, layout: tuple[LayerKV, ...], query_heads: int, dtype: torch.dtype) -> None:
        """Any model will do."""

    def prepare(
        self, geometry: Geometry | DeviceGeometry, layout: tuple[LayerKV, ...], query_heads: int
    ) -> PreparedAttention:
        assert isinstance(geometry, Geometry)
        follow_torch()
        return PreparedHost(geometry, layout, query_heads)


class PreparedHost:
    def __init__(self, geometry: Geometry, layout: tuple[LayerKV, ...], query_heads: int) -> None:
        self.geometry, self.layout, self.query_heads = geometry, layout, query_heads
        self._slots = {group: _slots(tables, geometry.page_size) for group, tables in geometry.page_tables.items()}
        self._tiles: dict[int, np.ndarray[Any, Any]] = {}
        bases = np.repeat(np.add(geometry.starts, geometry.reals), geometry.counts)
        draft = array(geometry.draft_rows)
        self._bases = bases
        self._limits = np.where(draft < 0, array(geometry.positions) + 1, bases)
        self._ancestors = array(geometry.ancestors)
        self._fallback: PreparedAttention | None = None

    def attend(
        self, kv: LayerKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        if q_NHD.dtype not in DTYPES:
            return self._reference().attend(kv, q_NHD, keys_PGD, values_PGD)
        out = torch.empty_like(q_NHD)
        attend(
            array(q_NHD),
            array(keys_PGD),
            array(values_PGD),
            self._slots[kv.group],
            self._tiles_of(self.query_heads // kv.kv_heads),
            self._limits,
            self._bases,
            self._ancestors,
            sys.maxsize if kv.window is None else kv.window,
            np.float32(kv.head_dim**-0.5),
            array(out),
        )
        return out

    def _tiles_of(self, shared: int) -> np.ndarray[Any, Any]:
        if shared not in self._tiles:
            self._tiles[shared] = _tiles(self.geometry.counts, max(1, TILE_QUERIES // shared))
        return self._tiles[shared]

    def _reference(self) -> PreparedAttention:
        if self._fallback is None:
            self._fallback = ReferenceAttention().prepare(self.geometry, self.layout, self.query_heads)
        return self._fallback


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
