"""Accepted side branches are moved to where a chain's rows would be."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stridelm.cache.pool import PagePool
from stridelm.draft.base import TreeShape
from stridelm.models.layers.decoder import LayerKV
from stridelm.run.eager import EagerRunner
from stridelm.types import CANDIDATE
from support.checks import compaction
from support.doubles.interpreter import INTERPRETED
from support.oracles.attention import Piece, geometry, make, random_tree

CPU = torch.device("cpu")


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_compact(page_size: int) -> None:
    """The n-th row of the path comes to lie n places behind the real rows; nothing else that is held changes."""
    for seed in range(20):
        rng = random.Random(seed)
        width = rng.choice((3, 17, 64))
        pieces = [Piece(rng.randrange(20), rng.randint(1, 3), random_tree(rng, width)) for _ in range(4)]
        case = make(pieces, page_size=page_size, seed=seed)
        pool = PagePool((case.kv,), {"main": len(case.keys) // page_size - 1}, page_size, case.dtype, CPU)
        pool.keys[0].copy_(case.keys)
        pool.values[0].copy_(case.values)
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
        EagerRunner(None, pool, None).compact(batch, draft, verdict)  # type: ignore[arg-type]
        for i, (piece, path) in enumerate(zip(pieces, paths)):
            for storage in range(piece.base + len(path)):
                depth = storage - piece.base
                source = case.slot(i, storage if depth < 0 else piece.base + path[depth])
                assert torch.equal(pool.keys[0][case.slot(i, storage)], case.keys[source])
                assert torch.equal(pool.values[0][case.slot(i, storage)], case.values[source])


@INTERPRETED
@pytest.mark.parametrize("requests", [1, 5])
def test_two_ways(requests: int) -> None:
    """The kernel leaves the very pool that torch does, in page groups of several layers."""
    from stridelm.kernels.triton_rows import Pools

    layout = (LayerKV("main", 2, 8), LayerKV("other", 1, 6), LayerKV("main", 1, 24))
    moved, wanted = (compaction.pool(layout, requests, torch.bfloat16, "cpu") for _ in range(2))
    for group, layers in {"main": (0, 2), "other": (1,)}.items():
        moved.pools[group] = Pools.of([tensor for n in layers for tensor in (moved.keys[n], moved.values[n])])
    paths = compaction.Paths(requests, ("main", "other"), "cpu")
    for seed in range(4):
        paths.draw(seed)
        for pool in (moved, wanted):
            EagerRunner(None, pool, None).compact(paths.batch, paths.draft, paths.verdict)  # type: ignore[arg-type]
        for got, expected in zip((*moved.keys, *moved.values), (*wanted.keys, *wanted.values), strict=True):
            assert torch.equal(got, expected)


def test_torch_moves_on_a_cpu() -> None:
    assert not PagePool((LayerKV("main", 2, 8),), {"main": 2}, 4, torch.float32, CPU).pools
