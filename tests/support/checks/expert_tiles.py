"""Checks of how experts' kernels cut their work into tiles."""

from __future__ import annotations

from unittest import mock

import torch

from stridelm.kernels import experts
from stridelm.kernels.experts import sort_pairs
from stridelm.kernels.products import Tile
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.layers.expert_products import GroupedExperts
from support.checks.experts import Case

TILES = (
    Tile(64, 16, 128, warps=4, stages=2),
    Tile(64, 16, 128, warps=4, stages=4),
    Tile(64, 32, 64, warps=4, stages=4),
    Tile(64, 64, 64, warps=4, stages=4),
    Tile(128, 128, 64, warps=8, stages=3),
)
"""Of every kind that `choose_tile` may choose."""


def check_sorted(rows: int, each: int, experts: int, device: str) -> None:
    """Every pair has one place, in a tile of its expert, in order; places and tiles that are not in use say so."""
    chosen = Case(rows, experts, each, 8, 8, torch.float32, device, skewed=True).chosen
    order = sort_pairs(chosen, experts)
    tiles: list[list[int]] = order.pairs.view(order.tiles, order.height).tolist()
    flat, found = chosen.flatten().tolist(), list[int]()
    for tile, expert in zip(tiles, order.experts.tolist()):
        used = [pair for pair in tile if pair >= 0] if expert >= 0 else []
        assert (expert < 0) == (not used) and used == sorted(used) and tile[: len(used)] == used
        assert all(flat[pair] == expert for pair in used)
        found += used
    assert sorted(found) == list(range(rows * each))


def check_tiles(case: Case) -> None:
    """All tiles give the same bits, and so do unsorted pairs."""
    wanted = case.run(GroupedExperts(), TritonOps())
    for tile in TILES:
        with (
            mock.patch.object(experts, "choose_tile", return_value=tile),
            mock.patch.object(experts, "height_of", return_value=tile.rows),
        ):
            assert torch.equal(case.run(GroupedExperts(), TritonOps()), wanted), tile
    with mock.patch.object(experts, "MAX_UNSORTED_ROWS", len(case.x)):
        assert torch.equal(case.run(GroupedExperts(), TritonOps()), wanted)
