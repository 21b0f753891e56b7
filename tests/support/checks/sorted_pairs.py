"""Check of the order in which experts' kernels take pairs of a row and an expert."""

from __future__ import annotations

import torch

from stridelm.kernels.experts import sort_pairs
from support.checks.experts import Case


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
