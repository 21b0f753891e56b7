"""A step's attention as launches of the Triton kernel.

A step's spans are divided into launches: short spans in low tiles and long ones in full tiles, so that a decode span in
a step with a prompt chunk still splits its keys among many programs. Draft rows whose ancestors may not lie in storage
in order of depth run last, one row per tile, and overwrite their results of the first launches. Tiles are cut by the
bounds that the host knows; a tile past its span's actual rows exits at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend
from stridelm.batch import Geometry
from stridelm.cache.layout import HeadsKV, LatentKV, LayerState
from stridelm.kernels.attention import paged_attention
from stridelm.kernels.attention_plan import HeadStack, LatentStack, Stack, forms
from stridelm.types import MAX_DRAFT_ROWS
from stridelm.upload import upload

SHORT = 16
"""Most rows of a short span."""
NOWHERE = 1 << 30
"""First row of a tile without rows."""
MANY_KEYS = 1 << 12
"""Bound on the keys of a launch that warms up: enough to be shared by two programs."""


class TiledBackend(AttentionBackend):
    """Keeps the tiles of recent steps: steps come in few shapes, and a captured step holds on to its own tiles."""

    def __init__(self, deterministic: bool) -> None:
        super().__init__(deterministic)
        self.cut = lru_cache(256)(cut)
        self.single = lru_cache(256)(single)


@dataclass(frozen=True, eq=False)
class Launch:
    """Tiles of one height."""

    tile_span: torch.Tensor
    """[T] int32."""
    tile_row: torch.Tensor
    """[T] int32 first row of each tile, counted from its span's first."""
    rows_per_tile: int
    filled: int
    """How many of them have rows, about: the others exit at once."""


class PagedStep:
    """One step's launches, for each number of rows that a tile has room for."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        assert isinstance(backend, TiledBackend)
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
            filled_tiles=launch.filled,
            paths_N64=paths_N64,
            window=state.window,
            scale=state.scale * state.key_scale,
            value_scale=state.value_scale,
            deterministic=self.deterministic,
            **entries,
            **self._spans,
        )


def launch_forms(
    state: HeadsKV | LatentKV, deterministic: bool, page_size: int, q_1HD: torch.Tensor, least: int = 1, **entries: Any
) -> None:
    """Launch every form over no rows. least: rows of the shortest span. entries: as `paged_attention` takes them."""
    nothing = torch.zeros(1, dtype=torch.int64, device=q_1HD.device)
    tile = torch.zeros(1, dtype=torch.int32, device=q_1HD.device)
    stack = stack_of(state, q_1HD.dtype, deterministic)
    for rows, shape, programs in forms(stack, q_1HD.device):
        if rows < min(least, stack.max_rows):
            continue
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
    return HeadStack.of(state.heads, state.kv_heads, state.key_dim, dtype, deterministic, state.stored)


def cut(bounds: tuple[int, ...], most: int, device: torch.device) -> tuple[Launch, ...]:
    """The launches of spans with these bounds, tiles of at most `most` rows."""
    launches = []
    for short in (True, False):
        longest = max((bound for bound in bounds if (bound <= SHORT) == short), default=0)
        if longest:
            height = min(most, 1 << (longest - 1).bit_length())
            tiles = tiles_of(bounds, height, short=short)
            launches.append(Launch(*_columns(tiles, device), height, len(tiles)))
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
    return Launch(*_columns(tiles, device), 1, len(tiles))


def _columns(tiles: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    spans, rows = upload(np.array(tiles, dtype=np.int32), device).reshape(-1, 2).t().contiguous()
    return spans, rows


def paths(ancestors_N: torch.Tensor) -> torch.Tensor:
    """[N, 64] int32: each row's draft rows in order of depth, which is the order of their numbers, then -1."""
    rows = torch.arange(MAX_DRAFT_ROWS, device=ancestors_N.device)
    member = ((ancestors_N[:, None] >> rows) & 1) == 1
    ordered = torch.where(member, rows, MAX_DRAFT_ROWS).sort(1).values
    return ordered.masked_fill(ordered == MAX_DRAFT_ROWS, -1).to(torch.int32)
