"""Attention over paged KV by the Triton kernel: the backend for GPUs.

A step's spans fall into launches: short spans in low tiles and long ones in full tiles, so that a decode step beside a
prompt chunk still shares its keys among many programs; and last, one row a tile, the draft rows whose ancestors may not
lie in storage in order of depth, which overwrite what the first launches gave them. Tiles are cut by the bounds that
the host knows; a tile beyond what its span turns out to have ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend, HeadsMixer
from stridelm.cache.layout import HeadsKV
from stridelm.kernels.attention import max_rows_per_tile, paged_attention
from stridelm.types import MAX_DRAFT_ROWS, DeviceGeometry, Geometry
from stridelm.upload import upload

SHORT = 16
"""Rows of a span up to which it counts as short."""


@dataclass(frozen=True, eq=False)
class Launch:
    """Tiles of one height."""

    tile_span: torch.Tensor
    """[T] int32."""
    tile_row: torch.Tensor
    """[T] int32 first row of each tile, counted from its span's first."""
    rows_per_tile: int


class TritonHeads(HeadsMixer):
    """One step's launches, for each number of queries a KV head."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry | DeviceGeometry) -> None:
        assert isinstance(geometry, DeviceGeometry)
        self.geometry = geometry
        self.deterministic = backend.deterministic
        self._spans: dict[str, Any] = {
            "firsts_R": geometry.firsts,
            "counts_R": geometry.counts,
            "starts_R": geometry.starts,
            "reals_R": geometry.reals,
            "ancestors_N": geometry.ancestors,
            "positions_N": geometry.positions,
            "page_size": geometry.page_size,
            "max_keys": geometry.max_keys,
        }
        self._paths: torch.Tensor | None = None

    @classmethod
    def check(cls, state: HeadsKV, dtype: torch.dtype, deterministic: bool) -> None:
        super().check(state, dtype, deterministic)
        max_rows_per_tile(state.heads // state.kv_heads, dtype, deterministic)

    def attend(
        self, state: HeadsKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        most = max_rows_per_tile(state.heads // state.kv_heads, q_NHD.dtype, self.deterministic)
        q_NHD = q_NHD.contiguous()
        out = torch.empty_like(q_NHD)
        for launch in self._launches(most, q_NHD.device):
            self._run(launch, None, state, q_NHD, keys_PGD, values_PGD, out)
        if self.deterministic and not self.geometry.is_chain:
            if self._paths is None:
                self._paths = paths(self.geometry.ancestors)
            self._run(self._single(q_NHD.device), self._paths, state, q_NHD, keys_PGD, values_PGD, out)
        return out

    def _launches(self, most: int, device: torch.device) -> tuple[Launch, ...]:
        kept = self.geometry.kept
        if most not in kept:
            kept[most] = _cut(self.geometry.bounds, most, device)
        return cast("tuple[Launch, ...]", kept[most])

    def _single(self, device: torch.device) -> Launch:
        return cast(Launch, self.geometry.kept.setdefault("single", _single(self.geometry.bounds, device)))

    def _run(
        self,
        launch: Launch,
        paths_N64: torch.Tensor | None,
        state: HeadsKV,
        q_NHD: torch.Tensor,
        keys_PGD: torch.Tensor,
        values_PGD: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        paged_attention(
            q_NHD,
            keys_PGD,
            values_PGD,
            out,
            tables_RP=self.geometry.tables[state.group],
            tile_span_T=launch.tile_span,
            tile_row_T=launch.tile_row,
            rows_per_tile=launch.rows_per_tile,
            paths_N64=paths_N64,
            window=state.window,
            scale=state.scale,
            deterministic=self.deterministic,
            **self._spans,
        )


class TritonAttention(AttentionBackend):
    """deterministic: kernels/attention.py says how."""

    device = "cuda"
    reads_device = True
    mixers: ClassVar = {HeadsKV: TritonHeads}


@lru_cache(maxsize=256)
def _cut(bounds: tuple[int, ...], most: int, device: torch.device) -> tuple[Launch, ...]:
    """The launches of spans with these bounds, tiles of at most `most` rows."""
    launches = []
    for short in (True, False):
        longest = max((bound for bound in bounds if (bound <= SHORT) == short), default=0)
        if longest:
            height = min(most, 1 << (longest - 1).bit_length())
            launches.append(Launch(*_columns(tiles_of(bounds, height, short=short), device), height))
    return tuple(launches)


def tiles_of(bounds: tuple[int, ...], rows: int, *, short: bool) -> list[tuple[int, int]]:
    """(span, first row) of the tiles, `rows` high, of the short spans or of the long ones."""
    spans = [span for span, bound in enumerate(bounds) if bound and (bound <= SHORT) == short]
    tiles = [(span, row) for span in spans for row in range(0, bounds[span], rows)]
    tiles.sort(key=lambda tile: -tile[1])  # within a prompt the last rows have the most keys: they start first
    return tiles


@lru_cache(maxsize=256)
def _single(bounds: tuple[int, ...], device: torch.device) -> Launch:
    """Every row that may be a draft row in a tile of its own: a draft has at most MAX_DRAFT_ROWS, the span's last."""
    tiles = [(span, row) for span, rows in enumerate(bounds) for row in range(max(0, rows - MAX_DRAFT_ROWS), rows)]
    return Launch(*_columns(tiles, device), 1)


def _columns(tiles: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    spans, rows = upload(np.array(tiles, dtype=np.int32), device).reshape(-1, 2).t().contiguous()
    return spans, rows


def paths(ancestors_N: torch.Tensor) -> torch.Tensor:
    """[N, 64] int32: each row's draft rows in order of depth, which is the order of their numbers, then -1."""
    rows = torch.arange(MAX_DRAFT_ROWS, device=ancestors_N.device)
    member = ((ancestors_N[:, None] >> rows) & 1) == 1
    ordered = torch.where(member, rows, MAX_DRAFT_ROWS).sort(1).values
    return ordered.masked_fill(ordered == MAX_DRAFT_ROWS, -1).to(torch.int32)
