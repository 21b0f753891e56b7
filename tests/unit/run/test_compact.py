"""Accepted side branches are moved to where a chain's rows would be."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stridelm.batch import CANDIDATE
from stridelm.cache.layout import HeadsKV
from stridelm.cache.pool import PagePool
from stridelm.draft.base import TreeShape
from stridelm.kernels import STEP_OPS
from support.checks import compaction
from support.doubles.interpreter import INTERPRETED
from support.oracles.attention import Piece, geometry, make, random_tree

CPU = torch.device("cpu")


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_compact(page_size: int) -> None:
    """The n-th row of the path moves to n places after the real rows; nothing else that is held changes."""
    for seed in range(20):
        rng = random.Random(seed)
        width = rng.choice((3, 17, 64))
        pieces = [Piece(rng.randrange(20), rng.randint(1, 3), random_tree(rng, width)) for _ in range(4)]
        case = make(pieces, page_size=page_size, seed=seed)
        pool = PagePool((case.kv,), {"main": len(case.keys) // page_size - 1}, page_size, case.dtype, CPU)
        pool.entries[0]["keys"].copy_(case.keys)
        pool.entries[0]["values"].copy_(case.values)
        leaves = [rng.randrange(-1, width) for _ in pieces]
        paths = [piece.path(leaf) for piece, leaf in zip(pieces, leaves)]
        shape = TreeShape.of(pieces[0].parents, [CANDIDATE] * width, CPU)
        draft: Any = type("D", (), {"is_chain": False, "width": width, "depths": shape.depths})
        longest = max(map(len, paths))
        verdict: Any = type(
            "V",
            (),
            {
                "path": torch.tensor([path + [rng.randrange(width)] * (longest - len(path)) for path in paths]),
                "kept": torch.tensor([len(path) for path in paths]),
            },
        )
        batch: Any = type("B", (), {"geometry": geometry(case)})
        pool.keep(batch, draft, verdict)
        for i, (piece, path) in enumerate(zip(pieces, paths)):
            for storage in range(piece.base + len(path)):
                depth = storage - piece.base
                source = case.slot(i, storage if depth < 0 else piece.base + path[depth])
                assert torch.equal(pool.entries[0]["keys"][case.slot(i, storage)], case.keys[source])
                assert torch.equal(pool.entries[0]["values"][case.slot(i, storage)], case.values[source])


@INTERPRETED
@pytest.mark.parametrize("requests", [1, 5])
def test_two_ways(requests: int) -> None:
    """The kernel leaves exactly the same pool as torch, in page groups of several layers."""
    triton = STEP_OPS.get("triton")()
    layout = (HeadsKV.of(2, 2, 8, group="main"), HeadsKV.of(1, 1, 6, group="other"), HeadsKV.of(1, 1, 24, group="main"))
    moved, wanted = (compaction.pool(layout, requests, torch.bfloat16, "cpu", ops) for ops in (triton, None))
    paths = compaction.Paths(requests, ("main", "other"), "cpu")
    for seed in range(4):
        paths.draw(seed)
        for pool in (moved, wanted):
            pool.keep(paths.batch, paths.draft, paths.verdict)
        for got, expected in zip(moved.tensors, wanted.tensors, strict=True):
            assert torch.equal(got, expected)
