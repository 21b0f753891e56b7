"""The row operations in Triton, run by its interpreter: against the definitions in float64, and against themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.cache.layout import HeadsKV, in_eight_bits
from stridelm.kernels import OPS, ops_for
from stridelm.kernels.compaction import Pools, compact
from stridelm.kernels.ops import ACTIVATIONS
from stridelm.kernels.plain import PlainOps
from stridelm.kernels.triton_rows import TritonOps
from support.checks.compaction import check_compact
from support.checks.compiled import compiled
from support.checks.latent_launches import check_queries
from support.checks.part_logits import SIZES, check_part_logits
from support.checks.row_ops import (
    HEADS,
    check_eight_bit_latents,
    check_eight_bits,
    check_gate,
    check_joined_norms,
    check_nan,
    check_normed_sums,
    check_norms,
    check_soft_cap,
    check_spread_logits,
    check_turn,
    check_values,
    noise,
)
from support.doubles.interpreter import INTERPRETED

interpreted = INTERPRETED
DTYPES = (torch.float32, torch.float16)  # the interpreter truncates bfloat16 instead of rounding it
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@interpreted
@every_dtype
@pytest.mark.parametrize("width", [1, 63, 384])
def test_norms(dtype: torch.dtype, width: int) -> None:
    check_norms(TritonOps(), 5, width, dtype, "cpu")
    check_normed_sums(TritonOps(), 5, width, dtype, "cpu")


@interpreted
@every_dtype
@pytest.mark.parametrize("width", [1, 63, 384])
def test_joined_norms(dtype: torch.dtype, width: int) -> None:
    check_joined_norms(TritonOps(), 5, width, dtype, "cpu")


@interpreted
@every_dtype
def test_spread_logits(dtype: torch.dtype) -> None:
    check_spread_logits(TritonOps(), 3, 2500, dtype, "cpu")


@interpreted
@every_dtype
def test_soft_cap(dtype: torch.dtype) -> None:
    check_soft_cap(TritonOps(), 5, 1030, dtype, "cpu")


def test_layer_ends_on_hopper(tmp_path: Path) -> None:
    """For compute capability 9.0 the kernels compile in every width and form, and fit into registers."""
    kernels = compiled("layer_end_compiles", tmp_path)
    gates = ["_product_kernel", "_gate_kernel"] * 4
    assert [kernel["name"] for kernel in kernels] == ["_add_normed_kernel"] * 24 + gates
    assert not any(kernel["stack"] for kernel in kernels)


@interpreted
@every_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [2, 50, 1500])
def test_gate(dtype: torch.dtype, width: int, activation: str) -> None:
    """Rows of one program and of two."""
    check_gate(TritonOps(), 5, width, dtype, "cpu", activation)


@interpreted
@every_dtype
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_turn(dtype: torch.dtype, sizes: tuple[int, int, int, int], norms: bool) -> None:
    """Programs whose heads are of one kind, two or three."""
    check_turn(TritonOps(), 5, sizes, norms, dtype, "cpu")


@interpreted
@every_dtype
@pytest.mark.parametrize("sizes", HEADS[::3], ids=str)
def test_values(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    """Values that are normalised or are the keys' projections, and layers that store none."""
    check_values(TritonOps(), 5, sizes, dtype, "cpu")


@interpreted
@every_dtype
@pytest.mark.parametrize("sizes", HEADS[::3], ids=str)
def test_eight_bits(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    """Keys and values as they are stored in eight bits."""
    check_eight_bits(TritonOps(), 5, sizes, dtype, "cpu")


@interpreted
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40])
def test_latent_queries(rows: int, interleaved: bool) -> None:
    """In one launch, with the bits of two."""
    check_queries(rows, 9, 40, 8, 24, interleaved, torch.float16, "cpu")
    check_queries(rows, 2, 128, 16, 136, interleaved, torch.float16, "cpu")


@interpreted
@every_dtype
@pytest.mark.parametrize("interleaved", [False, True])
def test_latents_in_eight_bits(dtype: torch.dtype, interleaved: bool) -> None:
    check_eight_bit_latents(TritonOps(), 5, 9, 40, 8, interleaved, dtype, "cpu")


@interpreted
@every_dtype
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_part_logits(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Equal scores, NaN, and rows of nothing but -inf."""
    check_part_logits(TritonOps(), 5, sizes, dtype, "cpu")


def test_part_logits_on_hopper(tmp_path: Path) -> None:
    """For compute capability 9.0 both kernels compile and fit into registers."""
    kernels = compiled("part_logits_compiles", tmp_path)
    assert [kernel["name"] for kernel in kernels] == ["_choose_kernel", "_logits_kernel"] * 6
    assert not any(kernel["stack"] for kernel in kernels)


@interpreted
@every_dtype
def test_nan(dtype: torch.dtype) -> None:
    check_nan(TritonOps(), dtype, "cpu")


@interpreted
@every_dtype
def test_views(dtype: torch.dtype) -> None:
    """Rows with gaps between them and rows at odd addresses have the same bits as elsewhere. No rows: no rows."""
    ops, weight, x = TritonOps(), noise(1, 100, dtype=dtype, device="cpu"), noise(2, 4, 100, dtype=dtype, device="cpu")
    wide = torch.nn.functional.pad(x, (1, 2))
    odd = wide.flatten()[1:-2].as_strided((4, 100), (103, 1))
    for view in (wide[:, 1:101], odd):
        assert torch.equal(ops.norm(view, weight, 1e-5), ops.norm(x, weight, 1e-5))
        assert torch.equal(ops.gate(view), ops.gate(x))
        sums = [ops.add_normed(each, each.clone(), weight, 1e-5, weight[:1])[0] for each in (view, x)]
        assert torch.equal(*sums)
        assert all(map(torch.equal, ops.add_norm(view, view, weight, 1e-5), ops.add_norm(x.clone(), x, weight, 1e-5)))
    assert ops.norm(x[:0], weight, 1e-5).shape == (0, 100) and ops.gate(x[:0]).shape == (0, 50)


@interpreted
@pytest.mark.parametrize(("requests", "depth"), [(1, 1), (3, 7), (30, 9)])
@pytest.mark.parametrize("sizes", [[(2, 8)], [(1, 6), (3, 24)], [(2, 32), (1, 8)], [(1, 3)]], ids=str)
def test_compact(sizes: list[tuple[int, int]], requests: int, depth: int) -> None:
    """Fewer entries than are moved at once, and more; layers of one width or several, in 16-byte vectors or not."""
    layout = tuple(HeadsKV.of(kv_heads, kv_heads, size, group="main") for kv_heads, size in sizes)
    for dtype in (torch.float32, torch.bfloat16):
        check_compact(layout, requests, depth, dtype, "cpu")
    check_compact(in_eight_bits(layout), requests, depth, torch.float32, "cpu")


@interpreted
def test_nothing_to_compact() -> None:
    none = torch.empty(0, dtype=torch.int64)
    compact(Pools.of([torch.zeros(4, 2, 8)]), none, none)


def test_choice() -> None:
    """A GPU gets this set, in the dtypes that it supports."""
    cuda = torch.device("cuda")
    assert type(ops_for(cuda, torch.bfloat16)) is OPS.get("triton") is TritonOps
    assert type(ops_for(cuda, torch.float64)) is PlainOps
