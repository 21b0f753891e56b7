"""Attention over paged KV by the Triton kernel: the backend for GPUs.

A step's spans fall into launches: short spans in low tiles and long ones in full tiles, so that a decode step beside a
prompt chunk still shares its keys among many programs; and last, one row a tile, the draft rows whose ancestors do not
lie in storage in order of depth, which overwrite what the first launches gave them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from stridelm.kernels.attention import max_rows_per_tile, paged_attention
from stridelm.models.layers.decoder import LayerKV
from stridelm.types import MAX_DRAFT_ROWS, Geometry

SHORT = 16
"""Rows of a span up to which it counts as short."""


@dataclass(slots=True)
class Launch:
    """Tiles of one height."""

    tile_span: torch.Tensor
    """[T] int32."""
    tile_row: torch.Tensor
    """[T] int32 first row of each tile, counted from its span's first."""
    rows_per_tile: int
    max_keys: int
    paths: torch.Tensor | None = None


class TritonAttention:
    """deterministic: a row's bits do not depend on what runs beside it; kernels/attention.py says how."""

    device: ClassVar[str | None] = "cuda"

    def __init__(self, deterministic: bool = True) -> None:
        self.deterministic = deterministic

    def prepare(self, geometry: Geometry, layout: tuple[LayerKV, ...], query_heads: int) -> PreparedTriton:
        return PreparedTriton(geometry, query_heads, self.deterministic)


class PreparedTriton:
    """The geometry as device tensors, made once, and the launches for each number of queries a KV head."""

    def __init__(self, geometry: Geometry, query_heads: int, deterministic: bool) -> None:
        self.geometry = geometry
        self.query_heads = query_heads
        self.deterministic = deterministic
        counts = self._tensor(geometry.counts)
        self._spans: dict[str, Any] = {
            "firsts_R": counts.cumsum(0).to(torch.int32) - counts,
            "counts_R": counts,
            "starts_R": self._tensor(geometry.starts),
            "reals_R": self._tensor(geometry.reals),
            "ancestors_N": geometry.ancestors,
            "positions_N": geometry.positions,
            "page_size": geometry.page_size,
        }
        self._tables = {group: self._table(pages) for group, pages in geometry.page_tables.items()}
        self._launches: dict[tuple[int, torch.dtype], list[Launch]] = {}

    def attend(
        self, kv: LayerKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        key = (self.query_heads // kv.kv_heads, q_NHD.dtype)
        if key not in self._launches:
            self._launches[key] = self._cut(max_rows_per_tile(*key, self.deterministic))
        q_NHD = q_NHD.contiguous()
        out = torch.empty_like(q_NHD)
        for launch in self._launches[key]:
            paged_attention(
                q_NHD,
                keys_PGD,
                values_PGD,
                out,
                tables_RP=self._tables[kv.group],
                tile_span_T=launch.tile_span,
                tile_row_T=launch.tile_row,
                rows_per_tile=launch.rows_per_tile,
                max_keys=launch.max_keys,
                paths_N64=launch.paths,
                window=kv.window,
                scale=kv.head_dim**-0.5,
                deterministic=self.deterministic,
                **self._spans,
            )
        return out

    def _cut(self, most: int) -> list[Launch]:
        """The step's launches, tiles of at most `most` rows."""
        geometry = self.geometry
        spans = range(len(geometry.counts))
        short = [span for span in spans if geometry.counts[span] <= SHORT]
        long = [span for span in spans if geometry.counts[span] > SHORT]
        launches = [self._launch(part, most) for part in (short, long) if part]
        if geometry.has_ordered and self.deterministic:
            launches.append(self._ordered())
        return launches

    def _launch(self, spans: list[int], most: int) -> Launch:
        counts = self.geometry.counts
        longest = max(counts[span] for span in spans)
        rows = min(most, 1 << (longest - 1).bit_length())
        tiles = [(span, row) for span in spans for row in range(0, counts[span], rows)]
        tiles.sort(key=lambda tile: -self.geometry.starts[tile[0]] - tile[1])  # those with the most keys first
        keys = max(self.geometry.starts[span] + counts[span] for span in spans)
        return Launch(self._tensor([t[0] for t in tiles]), self._tensor([t[1] for t in tiles]), rows, keys)

    def _ordered(self) -> Launch:
        geometry = self.geometry
        rows = geometry.ordered.nonzero()[:, 0]
        ends = torch.tensor(geometry.counts, device=rows.device).cumsum(0)
        spans = torch.searchsorted(ends, rows, right=True)
        keys = max(map(sum, zip(geometry.starts, geometry.counts, strict=True)))
        inside = (rows - self._spans["firsts_R"][spans]).to(torch.int32)
        return Launch(spans.to(torch.int32), inside, 1, keys, paths(geometry.ancestors))

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.geometry.positions.device)

    def _table(self, pages: list[list[int]]) -> torch.Tensor:
        width = max(map(len, pages))
        padded = [row + [0] * (width - len(row)) for row in pages]
        return torch.tensor(padded, dtype=torch.int32, device=self.geometry.positions.device)


def paths(ancestors_N: torch.Tensor) -> torch.Tensor:
    """[N, 64] int32: each row's draft rows in order of depth, which is the order of their numbers, then -1."""
    rows = torch.arange(MAX_DRAFT_ROWS, device=ancestors_N.device)
    member = ((ancestors_N[:, None] >> rows) & 1) == 1
    ordered = torch.where(member, rows, MAX_DRAFT_ROWS).sort(1).values
    return ordered.masked_fill(ordered == MAX_DRAFT_ROWS, -1).to(torch.int32)
