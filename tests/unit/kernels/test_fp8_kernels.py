"""Products in eight bits: in torch, and in Triton through its interpreter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels.fp8 import can_multiply, choose_tile, no_arrivals, parts_of
from stridelm.kernels.host.ops import HostOps
from stridelm.kernels.plain import PlainOps
from stridelm.kernels.plain_fp8 import BLOCK, plain_product, quantised, rows_per_scale, widened
from stridelm.kernels.products import Tile
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.layers.expert_products import of_every_expert
from stridelm.models.layers.fp8_experts import FP8Experts, GroupedFP8Experts
from stridelm.models.layers.products import tiled_product
from support.checkpoints.fp8 import FORMS, SUMS, by_definition
from support.checks.compiled import compiled
from support.checks.fp8 import (
    Case,
    ExpertsCase,
    check_gated,
    check_given_rows,
    check_parts_left_to_a_norm,
    check_product,
    check_quantised,
    check_quantised_gate,
    check_quantised_norms,
    check_sums_in_parts,
    check_tiles,
    product,
)
from support.checks.linear import check_row_bits
from support.checks.row_ops import noise
from support.doubles.interpreter import INTERPRETED

SHAPES = [(1, 128, (96,)), (5, 336, (130,)), (17, 48, (64, 40)), (33, 256, (256, 128, 72)), (3, 1296, (128, 128))]
"""Rows, inputs, matrices: whole blocks and partial ones, and matrices that end within a block."""
by_form = pytest.mark.parametrize("form", FORMS)
by_sum = pytest.mark.parametrize("form", SUMS)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@INTERPRETED
@by_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "inputs"), [(1, 128), (5, 200), (3, 2064), (2, 9000)])
def test_quantised_rows(count: int, inputs: int, dtype: torch.dtype, form: str) -> None:
    check_quantised(count, inputs, form, dtype, "cpu")


@INTERPRETED
@by_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("count", "width"), [(1, 48), (5, 200), (3, 1296)])
def test_rows_are_quantised_where_they_are_made(count: int, width: int, dtype: torch.dtype, form: str) -> None:
    """By norms and gates, in Triton and in torch: less than a block, blocks and a part of one, several programs."""
    for ops in (kind() for kind in (TritonOps, PlainOps, HostOps) if dtype in kind.dtypes):
        check_quantised_norms(ops, count, width, form, dtype, "cpu")
        check_quantised_gate(ops, count, width, form, dtype, "cpu")


@INTERPRETED
@by_form
@pytest.mark.parametrize(("count", "out"), [(1, 128), (5, 200), (40, 72)])
def test_given_rows(count: int, out: int, form: str) -> None:
    check_given_rows(Case(count, 336, (out, out), form, torch.float16))


@by_form
@by_shape
def test_plain(shape: tuple[int, int, tuple[int, ...]], form: str) -> None:
    """With the library's product and in tiles; a weight that is widened in several pieces too."""
    case = Case(*shape, form, torch.float32)
    for by in (torch.nn.functional.linear, tiled_product):
        check_product(case, partial(plain_product, by=by, powers=case.powers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stridelm.kernels.plain_fp8.CHUNK", 1)
        check_product(case, partial(plain_product, powers=case.powers))


@by_form
@by_shape
def test_plain_rows_are_their_own(shape: tuple[int, int, tuple[int, ...]], form: str) -> None:
    case = Case(40, *shape[1:], form, torch.float32)
    check_row_bits(lambda x: plain_product(x, case.weight, case.scale, case.bias, tiled_product, case.powers), case.x)


@INTERPRETED
@by_form
@by_shape
def test_product(shape: tuple[int, int, tuple[int, ...]], form: str) -> None:
    check_product(Case(*shape, form, torch.float32))


@INTERPRETED
@by_form
@pytest.mark.parametrize("out", [128, 96, 20])
def test_gated(out: int, form: str) -> None:
    """Gate and up with scales of their own, whatever their height."""
    check_gated(Case(5, 336, (out, out), form, torch.float32), "silu")


@INTERPRETED
@by_sum
@pytest.mark.parametrize("outs", [(192, 192), (128, 128)])
def test_tiles(outs: tuple[int, ...], form: str) -> None:
    check_tiles(Case(131, 208, outs, form, torch.float32))


@INTERPRETED
@by_form
@pytest.mark.parametrize(
    ("count", "out", "inputs"), [(1, 96, 1024), (1, 96, 2064), (20, 130, 1024), (20, 130, 2064), (40, 130, 2064)]
)
def test_sums_in_parts(count: int, out: int, inputs: int, form: str) -> None:
    """Whole parts, and a last one that ends within a block; the bias is added once. By the program of a tile that comes
    last, which leaves nothing to the next product."""
    case = Case(count, inputs, (out,), form, torch.float32)
    parts = parts_of(-(-out // 64), -(-inputs // BLOCK), case.x.device)
    assert parts > 1
    check_product(case, partial(product, arrivals=no_arrivals(case.x.device), powers=case.powers))
    if form == "block":
        check_sums_in_parts(case, parts)
    for dtype in (torch.float32, torch.float16):
        check_parts_left_to_a_norm(case, dtype)


@INTERPRETED
@by_sum
@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("parts", [1, 3])
def test_products_of_several_blocks(parts: int, blocks: int, form: str) -> None:
    """The same bits as block by block, also where the last product has fewer blocks, or a part none at all; matrices
    that end within a tile have scales of their own."""
    for count, inputs, outs in ((1, 1040, (64,)), (11, 1296, (64, 40))):
        case = Case(count, inputs, outs, form, torch.float32)
        arrivals = no_arrivals(case.x.device)
        run = partial(product, case.x, case.weight, case.scale, case.bias, arrivals=arrivals)
        got = run(tile=Tile(64, 8, blocks * BLOCK, warps=4, stages=2), parts=parts)
        case.close(got, case.wanted(bias=True))
        if parts == 1:
            assert torch.equal(got, product(case.x, case.weight, case.scale, case.bias))


@INTERPRETED
@by_sum
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("count", [40, 70])
def test_tall_tiles(count: int, activation: str | None, form: str) -> None:
    """The same sums, the other way round; a tile's outputs with one scale and with several."""
    for outs in ((64, 64), (20, 20)):
        case = Case(count, 336, outs, form, torch.float32)
        got, wanted = (
            product(case.x, case.weight, case.scale, case.bias, activation, arrivals=arrivals)
            for arrivals in (no_arrivals(case.x.device), None)
        )
        torch.testing.assert_close(got, wanted)


@INTERPRETED
@by_sum
def test_rows_are_their_own(form: str) -> None:
    """Whatever tile is chosen for the rows beside it."""
    case = Case(70, 272, (96,), form, torch.float16)
    run = partial(product, weight_OI=case.weight, scale=case.scale, bias_O=case.bias)
    check_row_bits(run, case.x, counts=(1, 2, 16, 17, 33, 64, 65, 70))
    assert run(case.x[:0]).shape == (0, 96)


@INTERPRETED
@by_form
@pytest.mark.parametrize("sizes", [(160, 64), (128, 256), (80, 48), (64, 208)], ids=str)
@pytest.mark.parametrize("count", [3, 40])
def test_experts(count: int, sizes: tuple[int, int], form: str) -> None:
    """One after another, all through each, and in few launches."""
    case = ExpertsCase(count, 5, 2, *sizes, form, torch.float32, "cpu")
    for kind in (FP8Experts, GroupedFP8Experts):
        case.check_parts(kind(case.layer, tiled_product, case.powers), PlainOps())
    every = of_every_expert(case.inputs(case.chosen), 5, lambda expert, x: x + expert)
    assert torch.equal(every, case.x[:, None] + case.chosen[..., None])


def test_quantised_while_loading() -> None:
    """A matrix is quantised as the definition says."""
    for shape in ((128, 128), (200, 336), (5, 40)):
        matrix = noise(1, *shape, dtype=torch.float32, device="cpu").bfloat16()
        for got, wanted in zip(quantised(matrix), by_definition(matrix, "block")):
            assert got.dtype == wanted.dtype and torch.equal(got.float(), wanted.float())
    stored, scale = quantised(torch.zeros(3, 4))
    assert not bool(stored.float().any()) and bool((scale > 0).all())


def test_transformers_agrees() -> None:
    """Its own code widens a weight to the same numbers, and quantises one to the same within a rounding of scales, or
    to the same where these are powers of two."""
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8")
    matrix = noise(1, 256, 384, dtype=torch.float32, device="cpu")
    stored, scale = quantised(matrix)
    if hasattr(theirs, "_dequantize_fp8_weight"):
        again = theirs._dequantize_fp8_weight(stored, scale, [128, 128], torch.float32)
        assert torch.equal(again, widened(stored, scale))
    settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    made = theirs.Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({"x.weight": matrix})
    torch.testing.assert_close(made["x.weight_scale_inv"], scale, rtol=1e-6, atol=0)
    same = (made["x.weight"].float() == stored.float()).float().mean()
    assert float(same) > 0.999
    if hasattr(theirs, "_get_ue8m0_dtype"):
        settings.scale_fmt = "ue8m0"
        made = theirs.Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({"x.weight": matrix})
        stored, scale = by_definition(matrix, "powers")
        assert torch.equal(made["x.weight_scale_inv"].float(), scale)
        assert torch.equal(made["x.weight"].float(), stored.float())


def test_the_tensor_cores_multiply(tmp_path: Path) -> None:
    """For compute capability 9.0 all products compile to instructions on e4m3, and no register is spilt."""
    kernels = compiled("fp8_compiles", tmp_path)
    products = [kernel for kernel in kernels if kernel["name"] == "_product_kernel"]
    assert len(products) == 58 and all(kernel["shared"] <= 227 * 1024 for kernel in kernels)
    assert all(kernel["instructions"] and not kernel["others"] for kernel in products)
    assert not any(kernel["stack"] for kernel in kernels)


def test_rows_per_scale() -> None:
    assert [rows_per_scale(576, 5), rows_per_scale(280, 35), rows_per_scale(7, 7)] == [128, 8, 1]


def test_what_can_be_multiplied() -> None:
    """Rows of a multiple of 16 numbers; float64 rows would lose bits."""
    weight = torch.zeros(4, 48, dtype=torch.float8_e4m3fn)
    assert can_multiply(weight, torch.bfloat16)
    assert not can_multiply(weight, torch.float64)
    assert not can_multiply(weight[:, :40].contiguous(), torch.bfloat16)
    assert not can_multiply(weight.bfloat16(), torch.bfloat16)


def test_tiles_fit_the_shared_memory_of_a_processor() -> None:
    for count in (1, 16, 17, 33, 64, 65, 5000):
        for outputs in (64, 4096, 28672, 128256):
            for is_gated in (False, True):
                tile = choose_tile(count, outputs, is_gated, torch.device("cpu"))
                stage = (tile.outputs * (1 + is_gated) + tile.rows) * tile.inputs
                assert stage * tile.stages <= 227 * 1024
