"""Attention over paged KV by the Triton kernel: the backend for GPUs.

A step's spans are divided into launches: short spans in low tiles and long ones in full tiles, so that a decode span in
a step with a prompt chunk still splits its keys among many programs. Draft rows whose ancestors may not lie in storage
in order of depth run last, one row per tile, and overwrite their results of the first launches. Tiles are cut by the
bounds that the host knows; a tile past its span's actual rows exits at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend, HeadsMixer, LatentMixer
from stridelm.cache.layout import HeadsKV, LatentKV, LayerState, LayerStates
from stridelm.kernels.attention import paged_attention
from stridelm.kernels.attention_plan import HeadStack, LatentStack, Stack, forms
from stridelm.types import MAX_DRAFT_ROWS, Geometry
from stridelm.upload import upload

SHORT = 16
"""Most rows of a short span."""
NOWHERE = 1 << 30
"""First row of a tile without rows."""
MANY_KEYS = 1 << 12
"""Bound on the keys of a launch that warms up: enough to be shared by two programs."""


@dataclass(frozen=True, eq=False)
class Launch:
    """Tiles of one height."""

    tile_span: torch.Tensor
    """[T] int32."""
    tile_row: torch.Tensor
    """[T] int32 first row of each tile, counted from its span's first."""
    rows_per_tile: int


class PagedStep:
    """One step's launches, for each number of rows that a tile has room for."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        assert isinstance(backend, TritonAttention)
        self._backend = backend
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

    def run(self, state: HeadsKV | LatentKV, q_NHD: torch.Tensor, **entries: Any) -> torch.Tensor:
        """[N, H, D]. entries: as `paged_attention` takes them."""
        out = q_NHD.new_empty(q_NHD.shape)
        for launch in self._launches(stack_of(state, q_NHD.dtype, self.deterministic).max_rows, q_NHD.device):
            self._run(launch, None, state, q_NHD, out, entries)
        if self.deterministic and not self.geometry.is_chain:
            if self._paths is None:
                self._paths = paths(self.geometry.ancestors)
            self._run(self._single(q_NHD.device), self._paths, state, q_NHD, out, entries)
        return out

    def _launches(self, most: int, device: torch.device) -> tuple[Launch, ...]:
        kept = self.geometry.kept
        if most not in kept:
            kept[most] = self._backend.cut(self.geometry.bounds, most, device)
        return cast("tuple[Launch, ...]", kept[most])

    def _single(self, device: torch.device) -> Launch:
        return cast(Launch, self.geometry.kept.setdefault("single", self._backend.single(self.geometry.bounds, device)))

    def _run(
        self,
        launch: Launch,
        paths_N64: torch.Tensor | None,
        state: HeadsKV | LatentKV,
        q_NHD: torch.Tensor,
        out: torch.Tensor,
        entries: dict[str, Any],
    ) -> None:
        paged_attention(
            q_NHD,
            out_NHD=out,
            tables_RP=self.geometry.tables[state.group],
            tile_span_T=launch.tile_span,
            tile_row_T=launch.tile_row,
            rows_per_tile=launch.rows_per_tile,
            paths_N64=paths_N64,
            window=state.window,
            scale=state.scale * state.key_scale,
            value_scale=state.value_scale,
            deterministic=self.deterministic,
            **entries,
            **self._spans,
        )


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


class TritonLatents(LatentMixer):
    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        self._step = PagedStep(backend, geometry)

    @classmethod
    def check(cls, state: LatentKV, dtype: torch.dtype, deterministic: bool) -> None:
        stack_of(state, dtype, deterministic)

    @classmethod
    def warm_up(
        cls, state: LatentKV, dtype: torch.dtype, deterministic: bool, page_size: int, device: torch.device
    ) -> None:
        q_NHR, turned_NHK = (
            torch.zeros(1, state.heads, width, dtype=dtype, device=device) for width in (state.rank, state.rope_dim)
        )
        pool = (page_size, 1, state.rank + state.rope_dim)
        rows_PGC = torch.zeros(pool, dtype=state.stored or dtype, device=device)
        entries = {"keys_PGD": rows_PGC, "values_PGD": None, "turned_NHT": turned_NHK}
        launch_forms(state, deterministic, page_size, q_NHR, **entries)

    def attend(
        self, state: LatentKV, q_NHR: torch.Tensor, turned_NHK: torch.Tensor, latents_PC: torch.Tensor
    ) -> torch.Tensor:
        rows_PGC = latents_PC[:, None]
        return self._step.run(state, q_NHR, keys_PGD=rows_PGC, values_PGD=None, turned_NHT=turned_NHK)


def launch_forms(
    state: HeadsKV | LatentKV, deterministic: bool, page_size: int, q_1HD: torch.Tensor, **entries: Any
) -> None:
    """Launch every form over no rows. entries: as `paged_attention` takes them."""
    nothing = torch.zeros(1, dtype=torch.int64, device=q_1HD.device)
    tile = torch.zeros(1, dtype=torch.int32, device=q_1HD.device)
    for rows, shape, programs in forms(stack_of(state, q_1HD.dtype, deterministic)):
        paged_attention(
            q_1HD,
            out_NHD=torch.empty_like(q_1HD),
            tables_RP=tile[None],
            tile_span_T=tile,
            tile_row_T=tile + NOWHERE,
            rows_per_tile=rows,
            firsts_R=tile,
            counts_R=tile,
            starts_R=tile,
            reals_R=tile,
            ancestors_N=nothing,
            positions_N=nothing,
            page_size=page_size,
            scale=state.scale,
            max_keys=MANY_KEYS,
            window=state.window,
            deterministic=deterministic,
            programs=programs,
            shape=shape,
            **entries,
        )


def stack_of(state: LayerState, dtype: torch.dtype, deterministic: bool) -> Stack:
    """Which of a layer's queries a tile stacks. Raises ValueError for an unsupported dtype or number of heads."""
    if isinstance(state, LatentKV):
        return LatentStack.of(state.heads, state.rank, dtype, deterministic)
    assert isinstance(state, HeadsKV)
    return HeadStack.of(state.heads, state.kv_heads, state.key_dim, dtype, deterministic)


class TritonAttention(AttentionBackend):
    """kernels/attention.py describes what `deterministic` changes."""

    device = "cuda"
    reads_device = True
    mixers: ClassVar = {HeadsKV: TritonHeads, LatentKV: TritonLatents}

    def __init__(self, deterministic: bool) -> None:
        super().__init__(deterministic)
        # Steps come in few shapes; a captured step holds on to its own tiles.
        self.cut = lru_cache(256)(cut)
        self.single = lru_cache(256)(single)
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
            columns = ((next(tiles), height) for height in heights if height)
            self.geometry.kept[most] = tuple(Launch(table[0], table[1], height) for table, height in columns)
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
            if height:
                tiles = tiles_of(bounds, height, short=short)
                room = min(rows, spans * -(-SHORT // height) if short else spans + rows // height)
                table = np.full((2, room), NOWHERE, dtype=np.int32)
                table[0] = 0
                table[:, : len(tiles)] = np.array(tiles, dtype=np.int32).reshape(-1, 2).T
                tables.append(upload(table, device))
    return tuple(tables)


def cut(bounds: tuple[int, ...], most: int, device: torch.device) -> tuple[Launch, ...]:
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
    tiles.sort(key=lambda tile: -tile[1])  # a prompt's last rows have the most keys, so they start first
    return tiles


def single(bounds: tuple[int, ...], device: torch.device) -> Launch:
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
