"""Attention over pages on a CPU in bfloat16 or float32, by a compiled kernel. Other dtypes, and entries in eight bits,
go to the reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend, HeadsMixer, LatentsAsHead
from stridelm.attention.expanded import ExpandingLatents
from stridelm.attention.reference import ReferenceHeads
from stridelm.batch import Geometry
from stridelm.cache.layout import HeadsKV, LatentKV
from stridelm.cache.pool import StoredLayers
from stridelm.kernels.host import attention, pair_attention
from stridelm.kernels.host.arithmetic import DTYPES, follow_torch
from stridelm.kernels.host.columns import address
from stridelm.kernels.host.geometry import TILE_QUERIES, pool_slots, reach, tiles
from stridelm.kernels.host.layer import run_layers
from stridelm.kernels.host.memory import array


class HostHeads(HeadsMixer):
    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        self._threads = follow_torch()
        self._backend, self._geometry = backend, geometry
        self._sight: _Sight | None = None
        self._fallback: ReferenceHeads | None = None

    def attend(
        self, state: HeadsKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        if q_NHD.dtype not in DTYPES or state.stored is not None:
            return self._reference().attend(state, q_NHD, keys_PGD, values_PGD)
        if self._sight is None:
            self._sight = _Sight(self._geometry)
        out = q_NHD.new_empty(*q_NHD.shape[:2], state.value_dim)
        paired = q_NHD.dtype == torch.bfloat16 and pair_attention.fits(keys_PGD.shape[2], values_PGD.shape[2])
        assert keys_PGD.is_contiguous() and values_PGD.is_contiguous()
        kernel = pair_attention if paired else attention
        kernel.attend(array(q_NHD), array(keys_PGD), array(values_PGD), *self._sight.of(state), array(out))
        return out

    def run_layers(
        self,
        stored: StoredLayers,
        slots: dict[str, torch.Tensor],
        layers_LF: np.ndarray[Any, Any],
        call: list[int],
    ) -> bool:
        if any(state.stored is not None for state in stored.states):
            return False
        pages, about = self._step
        kinds = [
            (address(slots[state.group], torch.int64), address(pages[state.group], torch.int32))
            for state in stored.states
        ]
        run_layers(np.array([*about, *call]), np.array(kinds), stored.table, layers_LF)
        return True

    @cached_property
    def _step(self) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
        """What a compiled call reads of the step, the same for all of its calls; the tables live until they are
        read."""
        geometry = self._geometry
        pages = {group: table.contiguous() for group, table in geometry.tables.items()}
        about = (
            self._threads,
            *next(iter(pages.values())).shape,
            geometry.page_size,
            address(geometry.firsts, torch.int32),
            address(geometry.starts, torch.int32),
            address(geometry.reals, torch.int32),
            address(geometry.draft_rows, torch.int64),
            address(geometry.ancestors, torch.int64),
            address(geometry.positions, torch.int64),
        )
        return pages, about

    def _reference(self) -> ReferenceHeads:
        if self._fallback is None:
            self._fallback = ReferenceHeads(self._backend, self._geometry)
        return self._fallback


class HostLatents(LatentsAsHead, ExpandingLatents):
    heads = HostHeads

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        LatentsAsHead.__init__(self, backend, geometry)
        ExpandingLatents.__init__(self, backend, geometry)

    def attend_expanded(
        self,
        state: LatentKV,
        q_MHD: torch.Tensor,
        turned_MHK: torch.Tensor,
        both_LHX: torch.Tensor,
        tails_LK: torch.Tensor,
    ) -> torch.Tensor:
        heads, width = q_MHD.shape[1:]
        keys_LHD, values_LHV = both_LHX.split((width, both_LHX.shape[2] - width), dim=2)
        tails_LHK = tails_LK[:, None].expand(-1, heads, -1)
        keys_LHD = torch.cat((keys_LHD, tails_LHK), dim=2)
        as_heads = state.as_heads(heads)
        as_heads = replace(as_heads, key_dim=width + state.rope_dim)
        queries = torch.cat((q_MHD, turned_MHK), dim=2)
        return self._heads.attend(as_heads, queries, keys_LHD, values_LHV.contiguous())


class _Sight:
    """What a step's rows see, for layers that are run part by part."""

    def __init__(self, geometry: Geometry) -> None:
        tables = {group: array(pages.contiguous()) for group, pages in geometry.tables.items()}
        self._slots = {group: pool_slots(pages, geometry.page_size) for group, pages in tables.items()}
        self._firsts, self._rows = array(geometry.firsts), geometry.positions.shape[0]
        self._tiles: dict[int, np.ndarray[Any, Any]] = {}
        self._ancestors = array(geometry.ancestors)
        spans = (self._firsts, array(geometry.starts), array(geometry.reals))
        self._bases, self._limits = reach(*spans, array(geometry.draft_rows), array(geometry.positions))

    def of(self, state: HeadsKV) -> tuple[Any, ...]:
        """As `attend` takes it."""
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


class HostAttention(AttentionBackend):
    """Always deterministic over heads. Over latents, unless it need not be, which makes long prompts faster."""

    device = "cpu"
    mixers: ClassVar = {HeadsKV: HostHeads, LatentKV: HostLatents}

    def __init__(self, deterministic: bool = True) -> None:
        super().__init__(deterministic)
