"""Attention over pages on a CPU in 16-bit or float32: the reference's tiles in a third of its operations.

What the reference does block by block, because it trusts no product, is done here in one call wherever the result was
measured to be the same for every row count and every length of padding (docs/decisions/0003-row-invariance.md):

- scores over all keys of a tile at once: a float32 product keeps its bits however many columns it has;
- one softmax over the whole row: lanes are added in order, and padding adds exact zeros behind;
- values still in blocks of fixed length: a float32 product does not keep its bits when zeros are added behind its
  inner dimension.

float64 goes to the reference: there, scores depend on the number of columns.
Legend: as in reference.py; Z = G * T is the batch of the products, KV heads outermost, L = blocks * BLOCK.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from stridelm.attention.base import PreparedAttention
from stridelm.attention.reference import MAX_SCORES, ReferenceAttention
from stridelm.attention.tiles import BLOCK, TileGroup, tile_groups
from stridelm.models.layers.decoder import LayerKV
from stridelm.types import Geometry


class CpuAttention:
    device: ClassVar[str | None] = "cpu"

    def __init__(self) -> None:
        self._reference = ReferenceAttention()

    def prepare(self, geometry: Geometry, layout: tuple[LayerKV, ...], query_heads: int) -> PreparedAttention:
        return PreparedCpu(geometry, query_heads, self._reference.prepare(geometry, layout, query_heads))


class _Ready:
    """A tile group with what its products need: made once a step, filled anew by every layer.

    Buffers and the views onto them are kept because a view costs as much as a product here.
    """

    def __init__(self, kv: LayerKV, group: TileGroup, per_head: int, stored: torch.dtype) -> None:
        tiles, rows, heads, dim = group.tiles, group.rows_per_tile, kv.kv_heads, kv.head_dim
        self.group = group
        self.bias_ZML = _flat_bias(kv, group)
        batch, height, length = self.bias_ZML.shape
        queries = torch.zeros(batch, height, dim)
        self.queries_ZMD = queries
        self.queries_in = queries.view(heads, tiles, height, dim)[:, :, : rows * per_head].unflatten(
            2, (rows, per_head)
        )
        """[G, T, n, H / G, D]: where the rows' queries go; the padding behind them stays zero."""
        self.taken_SGD = torch.empty(tiles * length, heads, dim, dtype=stored)
        self.taken_GSD = self.taken_SGD.transpose(0, 1)
        keys, values = torch.empty(2, heads, tiles * length, dim)
        self.keys_in, self.values_in = keys, values
        self.keys_ZDL = keys.view(batch, length, dim).transpose(1, 2)
        self.values_ZLD = values.view(batch, length, dim)

    def gather(self, pool_PGD: torch.Tensor, into_GSD: torch.Tensor) -> None:
        """The group's slots of a pool, as float32 and KV head by KV head."""
        torch.index_select(pool_PGD, 0, self.group.slots, out=self.taken_SGD)
        into_GSD.copy_(self.taken_GSD)


class PreparedCpu:
    def __init__(self, geometry: Geometry, query_heads: int, fallback: PreparedAttention) -> None:
        self.geometry = geometry
        self.query_heads = query_heads
        self.rows = geometry.positions.shape[0]
        self._fallback = fallback
        self._ready: dict[tuple[str, int, int, int | None], list[_Ready] | None] = {}

    def attend(
        self, kv: LayerKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        ready = None if q_NHD.dtype == torch.float64 else self._groups(kv, keys_PGD.dtype)
        if ready is None:
            return self._fallback.attend(kv, q_NHD, keys_PGD, values_PGD)
        whole = len(ready) == 1 and ready[0].group.tiles * ready[0].group.rows_per_tile == self.rows
        out = q_NHD.new_empty(self.rows + (not whole), *q_NHD.shape[1:])  # padding writes a row behind the last
        for part in ready:
            self._attend_group(kv, part, q_NHD, keys_PGD, values_PGD, out, whole)
        return out[: self.rows]

    def _attend_group(
        self,
        kv: LayerKV,
        part: _Ready,
        q_NHD: torch.Tensor,
        keys_PGD: torch.Tensor,
        values_PGD: torch.Tensor,
        out: torch.Tensor,
        whole: bool,
    ) -> None:
        """Write one group's rows of `out`; `whole`: they are all rows, in order."""
        group = part.group
        tiles, rows, heads, dim = group.tiles, group.rows_per_tile, kv.kv_heads, kv.head_dim
        per_head = self.query_heads // heads
        picked = q_NHD if whole else q_NHD.index_select(0, group.rows)
        part.queries_in.copy_(picked.view(tiles, rows, heads, per_head, dim).permute(2, 0, 1, 3, 4))
        part.gather(keys_PGD, part.keys_in)
        part.gather(values_PGD, part.values_in)
        scores = torch.baddbmm(part.bias_ZML, part.queries_ZMD, part.keys_ZDL, alpha=dim**-0.5)
        mixed = _mix(torch.softmax(scores, -1), part.values_ZLD, group.blocks)
        values = mixed.view(heads, tiles, -1, dim)[:, :, : rows * per_head].unflatten(2, (rows, per_head))
        values = values.permute(1, 2, 0, 3, 4)
        if whole:
            out.view(tiles, rows, heads, per_head, dim).copy_(values)
        else:
            out.index_copy_(0, group.scatter, values.reshape(tiles * rows, -1, dim).to(out.dtype))

    def _groups(self, kv: LayerKV, stored: torch.dtype) -> list[_Ready] | None:
        per_head = self.query_heads // kv.kv_heads
        key = (kv.group, per_head, kv.head_dim, kv.window)
        if key not in self._ready:
            groups = tile_groups(self.geometry, kv, per_head, torch.float32, self.rows)
            # More scores than may be held at once are left to the reference, which slices.
            fits = all(kv.kv_heads * group.bias.numel() <= MAX_SCORES for group in groups)
            self._ready[key] = [_Ready(kv, group, per_head, stored) for group in groups] if fits else None
        return self._ready[key]


def _flat_bias(kv: LayerKV, group: TileGroup) -> torch.Tensor:
    """[Z, M, L]: the group's bias for whole rows of keys, once for each KV head."""
    tiles, _, blocks, height, _ = group.bias.shape
    rows_TML = group.bias[:, 0].transpose(1, 2).reshape(tiles, height, blocks * BLOCK)
    return rows_TML.repeat(kv.kv_heads, 1, 1)


def _mix(weights_ZML: torch.Tensor, values_ZLD: torch.Tensor, blocks: int) -> torch.Tensor:
    """Weights times values, block by block and first to last: [Z, M, D]."""
    if blocks == 1:
        return torch.bmm(weights_ZML, values_ZLD)
    batch, height, _ = weights_ZML.shape
    parts = weights_ZML.view(batch, height, blocks, BLOCK).transpose(1, 2).reshape(-1, height, BLOCK)
    mixed = torch.bmm(parts, values_ZLD.view(batch * blocks, BLOCK, -1)).view(batch, blocks, height, -1)
    total = mixed[:, 0]
    for block in range(1, blocks):
        total = total + mixed[:, block]
    return total
