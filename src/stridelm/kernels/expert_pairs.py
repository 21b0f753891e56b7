"""Pairs of a row and an expert that it has chosen, in the tiles in which products take them, on a GPU.

Pairs of few rows are left as they are, a tile each, so that a step needs no launch to find out which rows share an
expert. Pairs of more rows are sorted by expert, and each expert's are cut into tiles: as many of the tallest as they
fill, and one for the rest, no taller than it has to be. A tile reads its expert's matrix whole, so an expert that many
rows have chosen should have few tiles; and a tile computes for all its places, so one that few have chosen should have
a low one. Which it is only the device knows: a tile says how tall it is, and a kernel has code for every height.

The number of tiles and of places depends on the number of rows alone, so launches can be captured: a tile beyond the
last one in use ends at once.

Legend: N rows, K experts that a row has chosen, P = N K pairs, E experts, T tiles; in kernels B pairs or tiles of a
block, R pairs of a tile.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, wait_for_inputs
from stridelm.kernels.products import tile_height

MAX_UNSORTED_ROWS = 4
"""Rows up to which pairs are not sorted: few of them share an expert, and a second reader may find it in the cache."""
SORT_BLOCK = 4096
"""Pairs that a program of the sort looks at at once."""
MANY_PAIRS = 64
"""Of an expert, on average: with more, tiles are of the taller kinds."""
NUMBERS = tl.constexpr(3)
"""Of a tile's description."""


class Heights(NamedTuple):
    """Of tiles: the least, twice that, and so on."""

    least: int
    kinds: int
    """How many there are."""

    @property
    def tallest(self) -> int:
        return self.least << (self.kinds - 1)


UNSORTED = Heights(16, 1)
HeightsOf = Callable[[int, int], Heights]
"""Rows of a step, pairs of an expert on average -> the heights that tiles may have."""


def several_heights(rows: int, mean: int) -> Heights:
    """No tile is taller than there are rows, since a row chooses an expert once."""
    if mean > MANY_PAIRS:
        return Heights(32, 3)
    return Heights(16, {16: 1, 32: 2}.get(tile_height(rows), 3))


def one_height(rows: int, mean: int) -> Heights:
    """As many pairs as an expert has on average."""
    return Heights(tile_height(mean), 1)


@dataclass(frozen=True)
class Tiled:
    """The pairs of a step in tiles."""

    heights: Heights
    """Those that tiles may have."""
    pairs: torch.Tensor
    """[places] int32: by tile, -1 where there is none; empty if they are not sorted."""
    table: torch.Tensor
    """[T, NUMBERS] int32: each tile's height, expert and first place; the height is 0 if it is not in use. Unsorted,
    [P] int64: each pair's expert."""
    mean: int
    """Pairs of an expert on average, rounded up."""

    @property
    def tiles(self) -> int:
        return self.table.shape[0]

    @property
    def is_sorted(self) -> bool:
        return self.pairs.shape[0] > 0

    @property
    def places(self) -> int:
        """Rows of a tensor by place, in which a tile has as many as it is high."""
        return self.pairs.shape[0] or self.tiles


@triton.jit
def _heights(rest_E, LEAST: tl.constexpr, HEIGHTS: tl.constexpr):
    """Of tiles for so many pairs, 0 for none."""
    height_E = tl.where(rest_E > 0, LEAST, 0)
    for i in tl.static_range(1, HEIGHTS):
        height_E = tl.where(rest_E > (LEAST << (i - 1)), LEAST << i, height_E)
    return height_E


@triton.jit(do_not_specialize=["count", "tiles"])
def _sort_kernel(
    chosen,
    pairs,
    table,
    count,
    tiles,
    E: tl.constexpr,
    BINS: tl.constexpr,
    LEAST: tl.constexpr,
    HEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (E,): each program counts all experts' pairs and then places its own, in their order."""
    wait_for_inputs(DEPENDENT)
    TALLEST: tl.constexpr = LEAST << (HEIGHTS - 1)
    expert = tl.program_id(0)
    bin_E = tl.arange(0, BINS)
    entry_B = tl.arange(0, BLOCK)
    counts_E = tl.zeros([BINS], tl.int32)
    for start in range(0, count, BLOCK):
        id_B = tl.load(chosen + start + entry_B, mask=start + entry_B < count, other=E)  # bin E is read by nobody
        counts_E += tl.histogram(id_B.to(tl.int32), BINS)
    full_E = counts_E // TALLEST
    last_E = _heights(counts_E - full_E * TALLEST, LEAST, HEIGHTS)
    first = tl.sum(tl.where(bin_E < expert, full_E + (last_E > 0).to(tl.int32), 0), 0)
    place = tl.sum(tl.where(bin_E < expert, full_E * TALLEST + last_E, 0), 0)
    mine = tl.sum(tl.where(bin_E == expert, counts_E, 0), 0)
    full = mine // TALLEST
    last = tl.sum(tl.where(bin_E == expert, last_E, 0), 0)
    placed = place
    for start in range(0, count, BLOCK):
        id_B = tl.load(chosen + start + entry_B, mask=start + entry_B < count, other=E)
        is_mine_B = (id_B == expert).to(tl.int32)
        tl.store(pairs + placed + tl.cumsum(is_mine_B, 0) - 1, start + entry_B, mask=is_mine_B > 0)
        placed += tl.sum(is_mine_B, 0)
    rest_R = mine + tl.arange(0, TALLEST)
    tl.store(pairs + place + rest_R, -1, mask=rest_R < full * TALLEST + last)
    own = full + (last > 0).to(tl.int32)
    for start in range(0, own, BLOCK):
        tile_B = start + entry_B
        at_B = table + (first + tile_B) * NUMBERS
        tl.store(at_B, tl.where(tile_B < full, TALLEST, last), mask=tile_B < own)
        tl.store(at_B + 1, expert, mask=tile_B < own)
        tl.store(at_B + 2, place + tile_B * TALLEST, mask=tile_B < own)
    if expert == E - 1:
        for start in range(first + own, tiles, BLOCK):
            tl.store(table + (start + entry_B) * NUMBERS, 0, mask=start + entry_B < tiles)


@triton.jit
def tile_of(table, tile, LEAST: tl.constexpr, HEIGHTS: tl.constexpr, SORTED: tl.constexpr):
    """(height, expert, first place) of a tile; the height is 0 if it is not in use, and there is no more to know."""
    if SORTED:
        at = table + tile * NUMBERS
        height, expert, place = tl.load(at), tl.load(at + 1), tile * LEAST
        if HEIGHTS > 1:
            place = tl.load(at + 2)
    else:
        height, expert, place = LEAST, tl.load(table + tile).to(tl.int32), tile
    return height, expert, place


@triton.jit
def rows_of_tile(place, pairs, each, R: tl.constexpr, SORTED: tl.constexpr, ACTIVATION: tl.constexpr):
    """(row of x, row of y, whether there is one) of each of a tile's pairs, from its first place on. With an ACTIVATION
    a pair reads its row of x, and y is by place; without one it reads x by place, and y is by pair."""
    entry_R = tl.arange(0, R)
    place_R = place + entry_R
    if SORTED:
        pair_R = tl.load(pairs + place_R)
    else:
        pair_R = tl.where(entry_R == 0, place, -1)
    exists_R = pair_R >= 0
    if ACTIVATION is not None:
        source_R, target_R = pair_R // each, place_R
    else:
        source_R, target_R = place_R, pair_R
    return source_R, target_R, exists_R


def tile_pairs(chosen_NK: torch.Tensor, experts: int, heights_of: HeightsOf = several_heights) -> Tiled:
    """The pairs of a step; on the device, nothing is known of them here."""
    rows, count = chosen_NK.shape[0], chosen_NK.numel()
    mean = -(-count // experts)
    if rows <= MAX_UNSORTED_ROWS:
        return Tiled(UNSORTED, chosen_NK.new_empty(0, dtype=torch.int32), chosen_NK.view(-1), mean)
    heights = heights_of(rows, mean)
    tiles, places = most(count, experts, heights)
    pairs = chosen_NK.new_empty(places, dtype=torch.int32)
    table = chosen_NK.new_empty(tiles, NUMBERS.value, dtype=torch.int32)
    block = min(SORT_BLOCK, triton.next_power_of_2(count))
    _sort_kernel[(experts,)](
        chosen_NK,
        pairs,
        table,
        count,
        tiles,
        experts,
        triton.next_power_of_2(experts + 1),
        *heights,
        block,
        num_warps=4 if block <= 1024 else 8,
        **dependent(chosen_NK.device),
    )
    return Tiled(heights, pairs, table, mean)


def most(count: int, experts: int, heights: Heights) -> tuple[int, int]:
    """Tiles and places that so many pairs have at most, however they are distributed."""
    used, (least, _) = min(count, experts), heights
    # An expert's last tile has less than twice as many places as pairs, unless it is one of the least, and fewer empty
    # places than one of the tallest has places.
    places = min(2 * count + least * used, count + (heights.tallest - 1) * used)
    return min(count, count // heights.tallest + used), places
