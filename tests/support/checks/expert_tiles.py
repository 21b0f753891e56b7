"""Checks of how experts' kernels cut their work into tiles."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch

from stridelm.kernels import expert_pairs, experts
from stridelm.kernels.expert_pairs import Heights, HeightsOf, Tiled, one_height, several_heights, tile_pairs
from stridelm.kernels.experts import PairTile
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.layers.expert_products import GroupedExperts
from support.checks.experts import Case

TILES = (
    (Heights(16, 1), PairTile(64, 128, warps=4, stages=2, tall_stages=2)),
    (Heights(16, 3), PairTile(64, 128, warps=4, stages=4, tall_stages=3)),
    (Heights(32, 1), PairTile(64, 64, warps=4, stages=4, tall_stages=4)),
    (Heights(64, 1), PairTile(64, 64, warps=4, stages=4, tall_stages=4)),
    (Heights(128, 1), PairTile(128, 64, warps=8, stages=3, tall_stages=3)),
    (Heights(32, 3), PairTile(128, 64, warps=8, stages=4, tall_stages=3)),
)
"""Of every kind that may be chosen, alone and together."""


def check_sorted(rows: int, each: int, experts: int, device: str) -> None:
    """Every pair has one place, in a tile of its expert, in order. An expert's tiles are the tallest, but for one that
    is no taller than it has to be; places and tiles that are not in use say so."""
    chosen = Case(rows, experts, each, 8, 8, torch.float32, device, skewed=True).chosen
    flat = chosen.flatten().tolist()
    for heights_of in (several_heights, one_height):
        order, found, place = tile_pairs(chosen, experts, heights_of), list[int](), 0
        least, tallest = order.heights.least, order.heights.tallest
        used = [tile for tile in order.table.tolist() if tile[0]]
        assert order.table[len(used) :, 0].eq(0).all()
        assert [tile[1] for tile in used] == sorted(tile[1] for tile in used)
        for number, (height, expert, first) in enumerate(used):
            tile = order.pairs[first : first + height].tolist()
            own = [pair for pair in tile if pair >= 0]
            is_last = number + 1 == len(used) or used[number + 1][1] != expert
            assert first == place and own == sorted(own) and tile == own + [-1] * (height - len(own))
            assert all(flat[pair] == expert for pair in own)
            assert 2 * len(own) > height or height == least
            assert is_last or len(own) == height == tallest
            found += own
            place += height
        assert sorted(found) == list(range(rows * each)) and place <= order.places


def _tiled(heights: Heights, chosen: torch.Tensor, number: int, chosen_by: HeightsOf) -> Tiled:
    return tile_pairs(chosen, number, lambda rows, mean: heights)


def check_tiles(case: Case) -> None:
    """All tiles give the same bits, and so do unsorted pairs."""
    wanted = case.run(GroupedExperts(), TritonOps())
    for heights, tile in TILES:
        with (
            mock.patch.object(experts, "choose_tile", return_value=tile),
            mock.patch.object(experts, "tile_pairs", partial(_tiled, heights)),
        ):
            assert torch.equal(case.run(GroupedExperts(), TritonOps()), wanted), tile
    with mock.patch.object(expert_pairs, "MAX_UNSORTED_ROWS", len(case.x)):
        assert torch.equal(case.run(GroupedExperts(), TritonOps()), wanted)
