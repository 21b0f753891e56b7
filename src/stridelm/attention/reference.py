"""Attention over pages in plain torch: the oracle for every other backend, on any device.

Row-invariant by construction: every product has fixed key blocks and a padded query count (tiles.QUERY_STEP), each
block's sum is one reduction of fixed length, and blocks are added one after another. Blocks that a row does not see
add exact zeros, so the length of the longest request in the batch does not change its neighbours' bits. Scores and
sums are float32 for 16-bit inputs, and the input's own type otherwise.

Legend: T tiles, n rows per tile, M query vectors per tile and KV head, G KV heads, H query heads, B BLOCK, D head size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from stridelm.attention.base import AttentionBackend, HeadsMixer, LatentsAsHead
from stridelm.attention.host_view import HostView
from stridelm.attention.tiles import BLOCK, QUERY_STEP, TileGroup, tile_groups
from stridelm.batch import Geometry
from stridelm.cache.layout import HeadsKV, LatentKV
from stridelm.kernels.entries import read
from stridelm.kernels.even_products import evened

MAX_SCORES = 1 << 25
"""Most scores held at once: tiles are computed in slices of this many."""
BATCH = 64
"""Matrices in one product on a GPU."""


class ReferenceHeads(HeadsMixer):
    """Tile groups, built once for each page group, queries per KV head and window, and shared by the layers."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        self.view = HostView.of(geometry)
        self.rows = geometry.positions.shape[0]
        self._groups: dict[tuple[str, int, int | None], list[TileGroup]] = {}

    @classmethod
    def check(cls, state: HeadsKV, dtype: torch.dtype, deterministic: bool) -> None:
        """Any layer can be served."""

    def attend(
        self, state: HeadsKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        rows, heads, _ = q_NHD.shape
        dtype = torch.float32 if q_NHD.element_size() == 2 else q_NHD.dtype
        groups = self._tile_groups(state, dtype)
        queries = q_NHD.to(dtype) * (state.scale * state.key_scale)
        values_PGD = values_PGD[..., : state.value_dim]
        if len(groups) == 1 and groups[0].tiles * groups[0].rows_per_tile == rows:
            return _values(state, groups[0], queries, keys_PGD, values_PGD, dtype).to(q_NHD.dtype)
        out = queries.new_empty(rows + 1, heads, state.value_dim)
        for group in groups:
            picked = queries.index_select(0, group.rows)
            out.index_copy_(0, group.scatter, _values(state, group, picked, keys_PGD, values_PGD, dtype))
        return out[:rows].to(q_NHD.dtype)

    def _tile_groups(self, state: HeadsKV, dtype: torch.dtype) -> list[TileGroup]:
        per_head = state.heads // state.kv_heads
        key = (state.group, per_head, state.window)
        if key not in self._groups:
            self._groups[key] = tile_groups(self.view, state, per_head, dtype, self.rows)
        return self._groups[key]


class ReferenceLatents(LatentsAsHead):
    heads = ReferenceHeads


class ReferenceAttention(AttentionBackend):
    """Always deterministic."""

    mixers: ClassVar = {HeadsKV: ReferenceHeads, LatentKV: ReferenceLatents}

    def __init__(self, deterministic: bool = True) -> None:
        super().__init__(True)


def _values(
    state: HeadsKV,
    group: TileGroup,
    queries: torch.Tensor,
    keys_PGD: torch.Tensor,
    values_PGD: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[T * n, H, D] attention of a group's rows, computed in slices that bound the memory for scores."""
    scores = state.kv_heads * group.bias[0].numel()
    step = max(1, MAX_SCORES // scores)
    if step >= group.tiles:
        return _slice_values(state, group, slice(0, group.tiles), queries, keys_PGD, values_PGD, dtype)
    parts = [
        _slice_values(state, group, slice(i, min(i + step, group.tiles)), queries, keys_PGD, values_PGD, dtype)
        for i in range(0, group.tiles, step)
    ]
    return torch.cat(parts)


def _slice_values(
    state: HeadsKV,
    group: TileGroup,
    part: slice,
    queries: torch.Tensor,
    keys_PGD: torch.Tensor,
    values_PGD: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    tiles, rows, blocks = part.stop - part.start, group.rows_per_tile, group.blocks
    heads_kv, dim, value_dim = state.kv_heads, state.key_dim, state.value_dim
    per_head = queries.shape[1] // heads_kv
    bias = group.bias[part]
    height = bias.shape[3]

    q = queries[part.start * rows : part.stop * rows].view(tiles, rows, heads_kv, per_head, dim).transpose(1, 2)
    q = F.pad(q.reshape(tiles, heads_kv, rows * per_head, dim), (0, 0, 0, height - rows * per_head))
    q = q[:, :, None].expand(-1, -1, blocks, -1, -1).reshape(-1, height, dim)
    slots = group.slots[part.start * blocks * BLOCK : part.stop * blocks * BLOCK]
    k = _blocks(keys_PGD, slots, tiles, dtype)
    v = _blocks(values_PGD, slots, tiles, dtype)

    scores = _product(q, k, transposed=True).view(tiles, heads_kv, blocks, height, BLOCK)
    scores += bias
    peak = scores.amax((2, 4), keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = _add_blocks(weights.sum(-1, keepdim=True))
    mixed = _product(weights.view(-1, height, BLOCK), v).reshape(tiles, heads_kv, blocks, height, value_dim)
    out = _add_blocks(mixed) / total
    if state.value_scale != 1.0:
        out *= state.value_scale
    out = out[:, :, : rows * per_head].view(tiles, heads_kv, rows, per_head, value_dim).transpose(1, 2)
    return out.reshape(tiles * rows, heads_kv * per_head, value_dim)


def _product(a: torch.Tensor, b: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """Batched product; b's matrices may be transposed, and a's height is a multiple of QUERY_STEP.

    Libraries choose their kernel by the shape, and another kernel sums in another order. So every call has the same
    shape: that of one matrix on a CPU, where the batch size was not seen to matter, and that of the whole batch on a
    GPU, where a has a height of one QUERY_STEP.
    """
    if a.device.type == "cpu":
        b = b.transpose(1, 2) if transposed else b
        out, (a, b) = b.shape[2], evened(a, b)
        steps = [torch.bmm(step, b) for step in a.split(QUERY_STEP, dim=1)]
        return (steps[0] if len(steps) == 1 else torch.cat(steps, dim=1))[:, :, :out].contiguous()
    count = a.shape[0]
    short = -count % BATCH
    if short:
        a, b = F.pad(a, (0, 0, 0, 0, 0, short)), F.pad(b, (0, 0, 0, 0, 0, short))
    parts = [
        torch.bmm(x, y.transpose(1, 2) if transposed else y)
        for x, y in zip(a.split(BATCH), b.split(BATCH), strict=True)
    ]
    return torch.cat(parts)[:count]


def _blocks(pool_PGD: torch.Tensor, slots: torch.Tensor, tiles: int, dtype: torch.dtype) -> torch.Tensor:
    """Gather slots from the pool as [T * G * blocks, BLOCK, D] in the dtype of the computation."""
    heads, dim = pool_PGD.shape[1:]
    gathered = read(pool_PGD, slots).view(tiles, -1, BLOCK, heads, dim)
    out = torch.empty(tiles, heads, gathered.shape[1], BLOCK, dim, dtype=dtype, device=pool_PGD.device)
    return out.copy_(gathered.permute(0, 3, 1, 2, 4)).view(-1, BLOCK, dim)


def _add_blocks(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the block dimension (2), strictly first to last."""
    total = parts[:, :, 0]
    for block in range(1, parts.shape[2]):
        total = total + parts[:, :, block]
    return total
