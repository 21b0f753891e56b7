"""How the reference backend cuts a step's rows into tiles, so that a row's bits do not depend on its neighbours.

A tile is a run of rows of one span with the list of KV slots that they attend to, cut into blocks of a fixed number of
tokens. Tiles of similar size are stacked and computed together.

    storage of a span's request      rows of the span
    0 ............ start  base       real rows: storage [0, own index]
    [ committed   ][real ][draft]    draft rows: storage [0, base) and the draft rows named in the bitmask

A draft row whose ancestors lie in storage in order of position sums the same keys in the same order as the real row
that will take its place if it is accepted. A row whose ancestors do not (a candidate on a side branch) gets a tile of
its own, whose key list is written out in order of position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from stridelm.attention.host_view import HostView
from stridelm.cache.layout import HeadsKV
from stridelm.types import MAX_DRAFT_ROWS

BLOCK = 128
"""Tokens in a block: keys are summed within a block by one product of fixed shape, then block after block."""
QUERY_STEP = 16
"""Query vectors of a tile are padded to a multiple of this, and multiplied this many at a time: wherever it was tried,
products of one fixed height kept a row's bits."""
STACK_QUERIES, STACK_KEYS = 64, 4 * BLOCK
"""Tiles of up to this many query vectors and keys are stacked together, larger ones by powers of two: computing the
padding costs less than a second stack."""
MAX_QUERIES = {"cpu": 256, "cuda": 16}
"""Most query vectors in a tile; longer spans are cut. On a GPU all tiles, and so all products, have one shape."""
MASKED = -1e30
"""Added to the scores of masked keys: finite, so that a padding row stays free of NaN."""


@dataclass(slots=True)
class TileGroup:
    """Tiles of one shape: T tiles of n rows against L = blocks * BLOCK keys."""

    rows: torch.Tensor
    """[T * n] int64 rows of the batch; padding repeats the tile's first row."""
    slots: torch.Tensor
    """[T * L] int64 pool slots of the keys; padding is the null slot 0."""
    tiles: int
    rows_per_tile: int
    blocks: int
    bias: torch.Tensor
    """[T, 1, blocks, M, BLOCK] float: 0 where a query sees a key, MASKED elsewhere, without any window."""
    distance: torch.Tensor
    """[T, n, L] int64: position of the row less position of the key, for windows."""
    scatter: torch.Tensor
    """[T * n] int64: row of the output that each tile row writes; padding writes row N, which is dropped."""


@dataclass(slots=True)
class _Tile:
    """One tile before stacking: rows [first, first + count) of span `span`."""

    span: int
    first: int
    count: int
    keys: int
    ordered: bool = False


def tile_groups(view: HostView, state: HeadsKV, queries_per_row: int, dtype: torch.dtype, rows: int) -> list[TileGroup]:
    """All tiles of a step as stacks for layers like this, ordered ones last, with the layer's window in the bias.

    rows: N, the number of rows of the batch.
    """
    stacks = sorted(cut(view, queries_per_row), key=lambda tiles: tiles[0].ordered)
    groups = [stack(view, tiles, state.group, queries_per_row, dtype, rows) for tiles in stacks]
    if state.window is not None:
        for group in groups:
            far = torch.where(group.distance >= state.window, MASKED, 0.0).to(dtype)
            group.bias = torch.minimum(group.bias, fold_bias(far, queries_per_row, group.blocks))
    return groups


def cut(view: HostView, queries_per_row: int) -> Iterator[list[_Tile]]:
    """The step's tiles, stacked by shape."""
    limit = max(1, MAX_QUERIES[view.geometry.positions.device.type] // queries_per_row)
    stacks: dict[tuple[bool, int, int], list[_Tile]] = {}
    for tile in _tiles(view, limit):
        height = -(-tile.count * queries_per_row // STACK_QUERIES)
        length = -(-tile.keys // STACK_KEYS)
        key = (tile.ordered, (height - 1).bit_length(), (length - 1).bit_length())
        stacks.setdefault(key, []).append(tile)
    yield from stacks.values()


def _tiles(view: HostView, limit: int) -> Iterator[_Tile]:
    ordered = view.ordered.nonzero()[:, 0].tolist() if not view.geometry.is_chain else []
    row = 0
    for span, (count, start, real) in enumerate(zip(view.counts, view.starts, view.reals, strict=True)):
        widest = start + real + (MAX_DRAFT_ROWS if count > real else 0)
        widest = min(widest, next(iter(view.geometry.tables.values())).shape[1] * view.geometry.page_size)
        for first in range(0, count, limit):
            size = min(limit, count - first)
            last = first + size
            keys = widest if last > real else start + last
            yield _Tile(span, row + first, size, keys)
        for own in ordered:
            if row <= own < row + count:
                yield _Tile(span, own, 1, widest, ordered=True)
        row += count


def stack(
    view: HostView, tiles: list[_Tile], group: str, queries_per_row: int, dtype: torch.dtype, rows: int
) -> TileGroup:
    """Turn tiles of similar shape into tensors.

    rows: N, the number of rows of the batch; later groups overwrite earlier ones, so ordered tiles come last.
    """
    device = view.geometry.positions.device
    height = max(tile.count for tile in tiles)
    blocks = -(-max(tile.keys for tile in tiles) // BLOCK)
    row_index = np.zeros((len(tiles), height), dtype=np.int64)
    scatter = np.full((len(tiles), height), rows, dtype=np.int64)
    slots = np.zeros((len(tiles), blocks * BLOCK), dtype=np.int64)
    base = np.zeros(len(tiles), dtype=np.int64)
    tables = view.tables(group)
    for i, tile in enumerate(tiles):
        row_index[i] = tile.first
        row_index[i, : tile.count] += np.arange(tile.count)
        scatter[i, : tile.count] = row_index[i, : tile.count]
        slots[i, : tile.keys] = storage_slots(tables[tile.span], tile.keys, view.geometry.page_size)
        base[i] = view.starts[tile.span] + view.reals[tile.span]
    rows_t = torch.from_numpy(row_index).to(device)
    slots_t = torch.from_numpy(slots).to(device)
    base_t = torch.from_numpy(base).to(device)
    key_positions, visible = _sight(view, tiles, rows_t, base_t, blocks * BLOCK)
    if tiles[0].ordered:
        slots_t, key_positions, visible = _in_order(view, rows_t, base_t, slots_t, key_positions)
    distance = view.geometry.positions[rows_t][:, :, None] - key_positions[:, None, :]
    bias = torch.where(visible, 0.0, MASKED).to(dtype)
    return TileGroup(
        rows=rows_t.flatten(),
        slots=slots_t.flatten(),
        tiles=len(tiles),
        rows_per_tile=height,
        blocks=blocks,
        bias=fold_bias(bias, queries_per_row, blocks),
        distance=distance,
        scatter=torch.from_numpy(scatter).to(device).flatten(),
    )


def storage_slots(table: np.ndarray, count: int, page_size: int) -> np.ndarray:
    """Pool slots of a request's first `count` storage indices."""
    index = np.arange(count)
    return table.astype(np.int64)[index // page_size] * page_size + index % page_size


def fold_bias(bias_TnL: torch.Tensor, queries_per_row: int, blocks: int) -> torch.Tensor:
    """[T, n, L] over rows -> [T, 1, blocks, M, BLOCK] over query vectors, M a multiple of QUERY_STEP."""
    tiles, rows, _ = bias_TnL.shape
    queries = -(-rows * queries_per_row // QUERY_STEP) * QUERY_STEP
    index = (torch.arange(queries, device=bias_TnL.device) // queries_per_row).clamp(max=rows - 1)
    return bias_TnL[:, index].view(tiles, queries, blocks, BLOCK).transpose(1, 2).contiguous()[:, None]


def _sight(
    view: HostView, tiles: list[_Tile], rows_Tn: torch.Tensor, base_T: torch.Tensor, keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(position of each key [T, L], whether a row sees a key [T, n, L]), keys in order of storage."""
    storage = torch.arange(keys, device=base_T.device)
    own = view.geometry.draft_rows[rows_Tn]
    real = own < 0
    # A real row's storage index is its position; a draft row sees all real entries.
    bound = torch.where(real, view.geometry.positions[rows_Tn] + 1, base_T[:, None])
    visible = storage < bound[:, :, None]
    key_positions = storage.expand(len(tiles), keys)
    if any(view.counts[t.span] > view.reals[t.span] for t in tiles):
        offset = (storage - base_T[:, None])[:, None, :]
        bit = (view.geometry.ancestors[rows_Tn][:, :, None] >> offset.clamp(0, MAX_DRAFT_ROWS - 1)) & 1
        visible |= (bit == 1) & (offset >= 0) & (offset < MAX_DRAFT_ROWS) & ~real[:, :, None]
        key_positions = _draft_key_positions(view, tiles, base_T, key_positions)
    return key_positions, visible


def _draft_key_positions(
    view: HostView, tiles: list[_Tile], base_T: torch.Tensor, key_positions: torch.Tensor
) -> torch.Tensor:
    """Key positions, with those of each span's draft rows filled in: siblings share a position."""
    keys = key_positions.shape[1]
    spans = torch.repeat_interleave(
        torch.arange(len(view.counts), device=base_T.device),
        torch.tensor(view.counts, device=base_T.device),
    )
    owner = torch.tensor([tile.span for tile in tiles], device=base_T.device)
    is_own = (spans[None] == owner[:, None]) & (view.geometry.draft_rows >= 0)[None]
    index = torch.where(is_own, base_T[:, None] + view.geometry.draft_rows[None], keys).clamp(max=keys)
    padded = torch.cat((key_positions, key_positions[:, :1]), 1)
    return padded.scatter(1, index, view.geometry.positions.expand(len(tiles), -1))[:, :keys]


def _in_order(
    view: HostView, rows_T1: torch.Tensor, base_T: torch.Tensor, slots_TL: torch.Tensor, key_positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The key list of single-row tiles rewritten in order of position: real entries, then the row's own path."""
    tiles, keys = slots_TL.shape
    bits = torch.arange(MAX_DRAFT_ROWS, device=base_T.device)
    member = ((view.geometry.ancestors[rows_T1[:, 0]][:, None] >> bits) & 1) == 1
    rank = member.cumsum(1) - 1
    source = (base_T[:, None] + bits).clamp(max=keys - 1)
    target = torch.where(member, base_T[:, None] + rank, keys)
    storage = torch.arange(keys, device=base_T.device).expand(tiles, keys)
    # Entries after the path are unused: they point at the null slot and are masked.
    real = torch.where(storage < base_T[:, None], slots_TL, 0)
    padded = torch.cat((real, real[:, :1]), 1)
    ordered = padded.scatter(1, target, slots_TL.gather(1, source))[:, :keys]
    visible = storage <= view.geometry.positions[rows_T1]
    return ordered, storage, visible[:, None]
