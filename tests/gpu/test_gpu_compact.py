"""The pool on a GPU moves accepted paths with the kernel, also inside a graph."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.cache.layout import HeadsKV
from stridelm.cache.pool import PagePool
from support.checks import compaction
from support.gpu import NEEDS_GPU

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's kernels run on the CPU"),
]
LAYOUT = (HeadsKV.of(8, 8, 128, group="main"), HeadsKV.of(8, 8, 128, group="main"), HeadsKV.of(1, 1, 6, group="other"))
REQUESTS = 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_captured(dtype: torch.dtype) -> None:
    """A captured compaction, replayed with other paths, pages and lengths, leaves the pool as torch does."""
    wanted = compaction.pool(LAYOUT, REQUESTS, dtype, "cuda")
    moved = PagePool(
        LAYOUT, dict.fromkeys(("main", "other"), REQUESTS * compaction.PAGES), 4, dtype, torch.device("cuda")
    )
    for ours, theirs in zip(moved.tensors, wanted.tensors, strict=True):
        ours.copy_(theirs)
    paths = compaction.Paths(REQUESTS, ("main", "other"), "cuda")

    def compact(pool: PagePool) -> None:
        pool.keep(paths.batch, paths.draft, paths.verdict)

    compact(moved)  # compiles; no row is kept yet, so nothing moves
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compact(moved)
    for seed in range(10):
        paths.draw(seed)
        rubbish = [torch.full((1 << 12,), -1, device="cuda") for _ in range(8)]  # may overwrite freed memory
        graph.replay()
        compact(wanted)
        del rubbish
        for got, expected in zip(moved.tensors, wanted.tensors, strict=True):
            assert torch.equal(got, expected)
