"""The row operations in Triton on a GPU: against the definitions, against themselves bit for bit, and captured."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.cache.layout import HeadsKV
from stridelm.kernels.compaction import Pools, compact
from stridelm.kernels.ops import ACTIVATIONS, QKRope
from stridelm.kernels.plain import PlainOps
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.layers.rope import Rope, RopeSpec
from support.checks import row_ops
from support.checks.compaction import check_compact, moves, pool
from support.checks.part_logits import SIZES, check_part_logits
from support.checks.row_ops import (
    check_gate,
    check_joined_norms,
    check_nan,
    check_normed_sums,
    check_norms,
    check_soft_cap,
    check_spread_logits,
    check_turn,
    check_values,
)
from support.gpu import NEEDS_GPU

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's kernels run on the CPU"),
]
DTYPES = sorted(TritonOps.dtypes, key=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HEADS, KV_HEADS, SIZE, MLP, WIDTH = 32, 8, 128, 14336, 4096
"""Sizes of an 8B model."""


# Against the definition; each check also compares rows with the same rows in smaller batches


@every_dtype
@pytest.mark.parametrize("width", [1, 63, 384, 2560, 4096, 8192])
def test_norms(dtype: torch.dtype, width: int) -> None:
    for rows in (17, 4096):
        check_norms(TritonOps(), rows, width, dtype, "cuda")
        check_normed_sums(TritonOps(), rows, width, dtype, "cuda")


@every_dtype
@pytest.mark.parametrize("width", [1, 63, 384, 2560, 4096, 8192])
def test_joined_norms(dtype: torch.dtype, width: int) -> None:
    for rows in (1, 17, 1024):
        check_joined_norms(TritonOps(), rows, width, dtype, "cuda")


@every_dtype
def test_spread_logits(dtype: torch.dtype) -> None:
    check_spread_logits(TritonOps(), 33, 151936, dtype, "cuda")


@every_dtype
def test_soft_cap(dtype: torch.dtype) -> None:
    check_soft_cap(TritonOps(), 33, 262144, dtype, "cuda")


@every_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [2, 50, 960, MLP])
def test_gate(dtype: torch.dtype, width: int, activation: str) -> None:
    for rows in (17, 2048):
        check_gate(TritonOps(), rows, width, dtype, "cuda", activation)


@every_dtype
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [*row_ops.HEADS, (16, 8, 128, 128), (HEADS, KV_HEADS, SIZE, SIZE), (16, 8, 256, 256), (96, 8, 128, 64)],
    ids=str,
)
def test_turn(dtype: torch.dtype, sizes: tuple[int, int, int, int], norms: bool) -> None:
    check_turn(TritonOps(), 90, sizes, norms, dtype, "cuda")


@every_dtype
@pytest.mark.parametrize("sizes", [(8, 2, 24, 24), (16, 8, 256, 256), (32, 4, 512, 512)], ids=str)
def test_values(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    check_values(TritonOps(), 90, sizes, dtype, "cuda")


@every_dtype
@pytest.mark.parametrize("sizes", [*SIZES, (256, 2048 * 128, 2048, 32)], ids=str)
def test_part_logits(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    check_part_logits(TritonOps(), 17, sizes, dtype, "cuda")


@every_dtype
def test_nan(dtype: torch.dtype) -> None:
    check_nan(TritonOps(), dtype, "cuda")


@every_dtype
@pytest.mark.parametrize("width", [100, 4096])
def test_addresses(dtype: torch.dtype, width: int) -> None:
    """Rows with gaps between them and rows at odd addresses have the same bits as elsewhere."""
    ops, x, weight = TritonOps(), torch.randn(5, width).cuda().to(dtype), torch.randn(width).cuda().to(dtype)
    wanted = ops.norm(x, weight, 1e-5)
    wide = torch.nn.functional.pad(x, (1, 2))
    assert torch.equal(ops.norm(wide[:, 1:-2], weight, 1e-5), wanted)
    assert torch.equal(ops.gate(wide[:, 1:-2]), ops.gate(x))
    for row in range(5):
        assert torch.equal(ops.norm(x[row:][:1], weight, 1e-5)[0], wanted[row])
        assert torch.equal(ops.norm(wide[row:, 1:-2][:1], weight, 1e-5)[0], wanted[row])


# A whole layer's rows


class Rows:
    """Inputs of every operation for up to `count` rows of an 8B model, with a cache of two layers."""

    layout = (HeadsKV.of(KV_HEADS, KV_HEADS, SIZE, group="main"),) * 2

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count, self.dtype = count, dtype
        rope = Rope(RopeSpec(SIZE, 500000.0), 8192)
        rope.prepare("cuda")
        empty = torch.empty(0, dtype=torch.int64, device="cuda")
        norms = torch.randn(2 * SIZE, device="cuda").to(dtype)
        self.rope = QKRope(HEADS, KV_HEADS, empty, rope.cos, rope.sin, norms, 1e-6)
        self.weight = torch.randn(WIDTH, device="cuda").to(dtype)
        self.pool = pool(self.layout, requests=1 + count // 60, dtype=dtype, device="cuda")
        self.slots = torch.empty(count, dtype=torch.int64, device="cuda")
        self.positions = torch.empty_like(self.slots)
        shapes = ((WIDTH,), (WIDTH,), (2 * MLP,), (HEADS + 2 * KV_HEADS, SIZE))
        self.inputs = [torch.empty(count, *shape, dtype=dtype, device="cuda") for shape in shapes]
        self.draw(0)

    def draw(self, seed: int) -> None:
        """New values in the same tensors."""
        generator = torch.Generator("cuda").manual_seed(seed)
        for tensor in self.inputs:
            tensor.normal_(generator=generator)
        self.positions.random_(0, 8192, generator=generator)
        slots = self.pool.entries[0]["keys"].shape[0]
        self.slots.copy_(torch.randperm(slots, generator=generator, device="cuda")[: self.count])

    def run(self, ops: TritonOps | PlainOps, index: slice) -> list[torch.Tensor]:
        """All operations over some rows: their results, and the entries that they write to the cache."""
        x, delta, gate_up, qkv = (tensor[index] for tensor in self.inputs)
        rope, slots = replace(self.rope, positions=self.positions[index]), self.slots[index]
        keys, values = self.pool.entries[0].values()
        total, normed = ops.add_norm(x.clone(), delta, self.weight, 1e-5)
        q = ops.rope_and_store(qkv, rope, keys, values, slots)
        return [ops.norm(x, self.weight, 1e-5), total, normed, ops.gate(gate_up), q, keys[slots], values[slots]]


@every_dtype
def test_among_thousands(dtype: torch.dtype) -> None:
    """A row of 4,096 has the bits that it has alone and in any batch, and they agree with the plain set."""
    rows = Rows(4096, dtype)
    everything = rows.run(TritonOps(), slice(None))
    for index in (slice(0, 1), slice(4095, 4096), slice(7, 9), slice(100, 116), slice(1, 300), slice(0, 2048)):
        for part, whole in zip(rows.run(TritonOps(), index), everything, strict=True):
            assert torch.equal(part, whole[index])
    for got, wanted in zip(everything, rows.run(PlainOps(), slice(None)), strict=True):
        close = 4e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(got, wanted, rtol=close, atol=close)


@every_dtype
@pytest.mark.parametrize("count", [1, 16, 1000])
def test_graph(dtype: torch.dtype, count: int) -> None:
    """Captured launches follow the values in their buffers."""
    rows = Rows(count, dtype)
    rows.run(TritonOps(), slice(None))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rows.run(TritonOps(), slice(None))
    for seed in (1, 2, 3):
        rows.draw(seed)
        for tensor in (*captured, *rows.pool.tensors):
            tensor.fill_(float("nan"))
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        for got, wanted in zip(replayed, rows.run(TritonOps(), slice(None)), strict=True):
            assert bool(wanted.isfinite().all()) and torch.equal(got, wanted)


# The cache


@pytest.mark.parametrize(("requests", "depth"), [(1, 8), (5, 1), (64, 8), (150, 20)])
@pytest.mark.parametrize("sizes", [[(8, 128)] * 3, [(1, 6), (3, 24)]], ids=str)
def test_compact(sizes: list[tuple[int, int]], requests: int, depth: int) -> None:
    """Paths that overlap their own target slots, in one block of entries or in dozens."""
    layout = tuple(HeadsKV.of(kv_heads, kv_heads, size, group="main") for kv_heads, size in sizes)
    for dtype in (torch.float32, torch.bfloat16):
        check_compact(layout, requests, depth, dtype, "cuda")


def test_captured_compact() -> None:
    """The slots of a captured move may change between replays."""
    layout = (HeadsKV.of(KV_HEADS, KV_HEADS, SIZE, group="main"),) * 4
    moved, wanted = (pool(layout, 16, torch.bfloat16, "cuda") for _ in range(2))
    pools = Pools.of(moved.tensors)
    source, target = (torch.zeros(16 * 8, dtype=torch.int64, device="cuda") for _ in range(2))
    compact(pools, source, target)  # compiles; nothing moves
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compact(pools, source, target)
    for seed in range(20):
        for buffer, slots in zip((source, target), moves(seed, 16, 8, "cuda"), strict=True):
            buffer.copy_(slots)
        graph.replay()
        wanted.compact("main", source, target)
        for got, expected in zip(moved.tensors, wanted.tensors, strict=True):
            assert torch.equal(got, expected)
