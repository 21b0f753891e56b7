"""Attention over paged KV by the Triton kernel: the backend for GPUs."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import ClassVar, cast

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend, HeadsMixer
from stridelm.attention.paged_step import (
    NOWHERE,
    SHORT,
    Launch,
    PagedStep,
    TiledBackend,
    launch_forms,
    stack_of,
    tiles_of,
)
from stridelm.attention.triton_latents import TritonLatents
from stridelm.batch import Geometry
from stridelm.cache.layout import HeadsKV, LatentKV, LayerStates
from stridelm.upload import upload


class TritonHeads(HeadsMixer):
    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        self._step = PagedStep(backend, geometry)

    @classmethod
    def check(cls, state: HeadsKV, dtype: torch.dtype, deterministic: bool) -> None:
        super().check(state, dtype, deterministic)
        stack_of(state, dtype, deterministic)

    @classmethod
    def warm_up(
        cls, state: HeadsKV, dtype: torch.dtype, deterministic: bool, page_size: int, device: torch.device
    ) -> None:
        q_NHD = torch.zeros(1, state.heads, state.key_dim, dtype=dtype, device=device)
        pool = (2, page_size, state.kv_heads, state.key_dim)
        keys, values = torch.zeros(pool, dtype=state.stored or dtype, device=device).unbind(0)
        launch_forms(state, deterministic, page_size, q_NHD, keys_PGD=keys, values_PGD=values)

    def attend(
        self, state: HeadsKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        return self._step.run(state, q_NHD.contiguous(), keys_PGD=keys_PGD, values_PGD=values_PGD)


class TritonAttention(TiledBackend):
    """kernels/attention.py describes what `deterministic` changes."""

    device = "cuda"
    reads_device = True
    mixers: ClassVar = {HeadsKV: TritonHeads, LatentKV: TritonLatents}

    def __init__(self, deterministic: bool) -> None:
        super().__init__(deterministic)
        self.tables = lru_cache(256)(tile_tables)

    def static_kind(self, geometry: Geometry, states: LayerStates, dtype: torch.dtype) -> Tiling | None:
        most = {stack_of(state, dtype, self.deterministic).max_rows for state in states}
        # In deterministic mode rows on side branches have tiles of their own, which are not captured.
        if self.deterministic and not geometry.is_chain:
            return None
        return tuple((rows, min(SHORT, rows), rows) for rows in sorted(most))

    def static(self, kind: Hashable, rows: int, spans: int, reach: int, like: Geometry) -> StaticTiles:
        return StaticTiles(self, cast(Tiling, kind), rows, spans, reach, like)


Tiling = tuple[tuple[int, int, int], ...]
"""For each maximum of rows per tile: (that maximum, rows per tile of short spans, rows per tile of long spans)."""


class StaticTiles:
    """The launches of a step with this many rows and spans, and the tensors they read. Padding is rows without
    ancestors, and tiles past their span's rows."""

    def __init__(
        self, backend: TritonAttention, tiling: Tiling, rows: int, spans: int, reach: int, like: Geometry
    ) -> None:
        device = like.firsts.device
        self._backend = backend
        self._tiling, self._size = tiling, (rows, spans)
        self._rows = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._spans = torch.zeros(4, spans, dtype=torch.int32, device=device)
        self._tiles = [table.clone() for table in backend.tables((), tiling, rows, spans, device)]
        positions, ancestors = self._rows
        firsts, counts, starts, reals = self._spans
        tables = {
            group: torch.zeros(spans, table.shape[1], dtype=torch.int32, device=device)
            for group, table in like.tables.items()
        }
        self.geometry = Geometry(
            bounds=(),
            firsts=firsts,
            counts=counts,
            starts=starts,
            reals=reals,
            draft_rows=ancestors,
            ancestors=ancestors,
            positions=positions,
            tables=tables,
            page_size=like.page_size,
            max_keys=reach,
            is_chain=True,
        )
        tiles = iter(self._tiles)
        for most, *heights in tiling:
            # Short spans are decodes or their drafts, mostly a tile each; few spans are long, with tiles full of rows.
            expected = (spans, -(-rows // most))
            self.geometry.kept[most] = tuple(
                Launch(table[0], table[1], height, min(filled, table.shape[1]))
                for height, filled, table in zip(heights, expected, tiles)  # the last stops with the others
            )
        self.nbytes = sum(x.nbytes for x in (self._rows, self._spans, *tables.values(), *self._tiles))

    def fill(self, geometry: Geometry) -> None:
        rows, spans = geometry.positions.shape[0], geometry.firsts.shape[0]
        self._rows[:, :rows] = torch.stack((geometry.positions, geometry.ancestors))
        self._rows[:, rows:].zero_()
        self._spans[:, :spans] = torch.stack((geometry.firsts, geometry.counts, geometry.starts, geometry.reals))
        for group, table in self.geometry.tables.items():
            table[:spans] = geometry.tables[group]
        tiles = self._backend.tables(geometry.bounds, self._tiling, *self._size, self._rows.device)
        for ours, theirs in zip(self._tiles, tiles, strict=True):
            ours.copy_(theirs)


def tile_tables(
    bounds: tuple[int, ...], tiling: Tiling, rows: int, spans: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """[2, T] int32 span and first row of each tile, for each launch of the tiling; padded with tiles without rows."""
    tables = []
    for _, *heights in tiling:
        for height, short in zip(heights, (True, False), strict=True):
            tiles = tiles_of(bounds, height, short=short)
            most_long = min(spans, rows // (SHORT + 1))  # of each the last tile may not be full
            room = min(rows, spans * -(-SHORT // height) if short else most_long + -(-rows // height))
            table = np.full((2, room), NOWHERE, dtype=np.int32)
            table[0] = 0
            table[:, : len(tiles)] = np.array(tiles, dtype=np.int32).reshape(-1, 2).T
            tables.append(upload(table, device))
    return tuple(tables)
