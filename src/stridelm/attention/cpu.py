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

from dataclasses import dataclass
from typing import ClassVar

import torch

from stridelm.attention.base import PreparedAttention
from stridelm.attention.reference import ReferenceAttention
from stridelm.attention.tiles import BLOCK, MASKED, TileGroup, cut, fold_bias, stack
from stridelm.models.layers.decoder import LayerKV
from stridelm.types import Geometry

MAX_SCORES = 1 << 25
"""Most scores held at once. A group over it is left to the reference, which slices."""


class CpuAttention:
    device: ClassVar[str | None] = "cpu"

    def __init__(self) -> None:
        self._reference = ReferenceAttention()

    def prepare(self, geometry: Geometry, layout: tuple[LayerKV, ...], query_heads: int) -> PreparedAttention:
        return PreparedCpu(geometry, query_heads, self._reference.prepare(geometry, layout, query_heads))


@dataclass(slots=True)
class _Ready:
    """A tile group with what its products need, shared by all layers."""

    group: TileGroup
    bias_ZML: torch.Tensor
    queries_ZMD: torch.Tensor
    """Filled anew by every layer; its padding stays zero."""


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
        ready = None if q_NHD.dtype == torch.float64 else self._groups(kv)
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
        shape = (heads, tiles, rows, per_head, dim)
        # [tiles, rows, G, per head, D] -> [G, tiles, rows, per head, D], cast on the way into the padded buffer.
        part.queries_ZMD.view(heads, tiles, -1, dim)[:, :, : rows * per_head].unflatten(2, (rows, per_head)).copy_(
            picked.view(tiles, rows, heads, per_head, dim).permute(2, 0, 1, 3, 4)
        )
        k_ZLD = _gather(keys_PGD, group)
        scores = torch.baddbmm(part.bias_ZML, part.queries_ZMD, k_ZLD.transpose(1, 2), alpha=dim**-0.5)
        mixed = _mix(torch.softmax(scores, -1), _gather(values_PGD, group), group.blocks)
        values = mixed.view(heads, tiles, -1, dim)[:, :, : rows * per_head].reshape(shape).permute(1, 2, 0, 3, 4)
        if whole:
            out.view(tiles, rows, heads, per_head, dim).copy_(values)
        else:
            out.index_copy_(0, group.scatter, values.reshape(tiles * rows, -1, dim).to(out.dtype))

    def _groups(self, kv: LayerKV) -> list[_Ready] | None:
        per_head = self.query_heads // kv.kv_heads
        key = (kv.group, per_head, kv.head_dim, kv.window)
        if key not in self._ready:
            stacks = sorted(cut(self.geometry, per_head), key=lambda tiles: tiles[0].ordered)
            groups = [stack(self.geometry, tiles, kv.group, per_head, torch.float32, self.rows) for tiles in stacks]
            fits = all(kv.kv_heads * group.bias.numel() <= MAX_SCORES for group in groups)
            self._ready[key] = [_make_ready(kv, group, per_head) for group in groups] if fits else None
        return self._ready[key]


def _make_ready(kv: LayerKV, group: TileGroup, per_head: int) -> _Ready:
    bias = group.bias
    if kv.window is not None:
        far = torch.where(group.distance >= kv.window, MASKED, 0.0).to(bias.dtype)
        bias = torch.minimum(bias, fold_bias(far, per_head, group.blocks))
    tiles, _, blocks, height, _ = bias.shape
    rows_TML = bias[:, 0].transpose(1, 2).reshape(tiles, height, blocks * BLOCK)
    batch = kv.kv_heads * tiles
    queries = torch.zeros(batch, height, kv.head_dim, dtype=bias.dtype)
    return _Ready(group, rows_TML.repeat(kv.kv_heads, 1, 1), queries)


def _gather(pool_PGD: torch.Tensor, group: TileGroup) -> torch.Tensor:
    """The group's slots of a pool as [Z, L, D] float32."""
    heads, dim = pool_PGD.shape[1:]
    taken = pool_PGD.index_select(0, group.slots)
    return taken.new_empty(heads, taken.shape[0], dim, dtype=torch.float32).copy_(taken.transpose(0, 1)).view(
        heads * group.tiles, -1, dim
    )


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
