"""Attention over pages on a CPU in bfloat16 or float32, by a compiled kernel. Other dtypes go to the reference."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend, Entries, HeadsMixer
from stridelm.attention.host_view import HostView
from stridelm.attention.reference import ReferenceHeads
from stridelm.cache.layout import HeadsKV
from stridelm.kernels.host.arithmetic import DTYPES, follow_torch
from stridelm.kernels.host.attention import attend
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
        self._view = view = HostView.of(geometry)
        self._slots = {group: _slots(view.tables(group), geometry.page_size) for group in geometry.tables}
        self._tiles: dict[int, np.ndarray[Any, Any]] = {}
        bases = np.repeat(np.add(view.starts, view.reals), view.counts)
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
            self._tiles[shared] = _tiles(self._view.counts, max(1, TILE_QUERIES // shared))
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


def _slots(tables_RP: np.ndarray[Any, Any], page_size: int) -> np.ndarray[Any, Any]:
    """[R, L] pool slot of every storage entry; after a request's own pages come slots of the null page."""
    pages_RP = tables_RP.astype(np.int64)
    return (pages_RP[:, :, None] * page_size + np.arange(page_size)).reshape(len(pages_RP), -1)


def _tiles(counts: list[int], max_rows: int) -> np.ndarray[Any, Any]:
    """[T, 3] (span, first row, rows): each span's rows in runs of at most `max_rows`."""
    tiles, row = [], 0
    for span, count in enumerate(counts):
        tiles += [(span, row + first, min(max_rows, count - first)) for first in range(0, count, max_rows)]
        row += count
    return np.array(tiles, dtype=np.int64)
