"""Products that add in a fixed order, on a GPU: a row's bits depend neither on the tile, nor on the number of rows, nor
on whether our kernel or the library multiplies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels.processors import multiprocessors
from stridelm.kernels.products import library_agrees, product
from stridelm.kernels.sums_in_parts import added_parts
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.layers.products import InOrderProduct
from support.checks.linear import check_row_bits, rows, weights
from support.checks.products import TILES, by_tile, check_gated, check_given, check_product
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
DTYPES = (torch.float16, torch.bfloat16)
SHAPES = [(1, 64, 96), (5, 200, 130), (33, 128, 40), (70, 1000, 3000), (300, 4096, 1024)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_product(*shape, dtype, "cuda")


@every_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gated(dtype: torch.dtype, activation: str) -> None:
    for shape in SHAPES[:4]:
        check_gated(*shape, dtype, "cuda", activation)


@every_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_given(dtype: torch.dtype, activation: str) -> None:
    """Fused or not, the bits are the same: up to 64 rows are fused, more are not."""
    for shape in SHAPES[:4]:
        check_given(*shape, dtype, "cuda", activation)
    weight, _ = weights(2, 2560, 256, dtype, "cuda")
    x, given = rows(2, 64, 2560, dtype, "cuda"), rows(3, 64, 256, dtype, "cuda")
    apart = TritonOps().gate(product(x, weight, None), activation, given)
    assert torch.equal(product(x, weight, None, activation, given), apart)


@every_dtype
@pytest.mark.parametrize(("width", "out"), [(64, 96), (200, 130), (4096, 1024), (14336, 512)])
def test_bits_of_every_tile(width: int, out: int, dtype: torch.dtype) -> None:
    """All tiles add in the same order, gated or not."""
    weight, _ = weights(0, width, out, dtype, "cuda")
    x = rows(0, 200, width, dtype, "cuda")
    wanted = product(x, weight, None)
    gated = TritonOps().gate(wanted, "silu")
    for tile in TILES:
        assert torch.equal(by_tile(x, weight, tile), wanted), tile
        if tile.outputs == 64 and tile.inputs < 256:  # others are not gated
            assert torch.equal(by_tile(x, weight, tile, "silu"), gated), tile


@every_dtype
def test_bits_of_any_number_of_rows(dtype: torch.dtype) -> None:
    """One row or thousands, with our kernel or the library's: the same bits, and the library does some of the work."""
    weight, bias = weights(1, 1024, 2048, dtype, "cuda")
    x = rows(1, 3000, 1024, dtype, "cuda")
    run = InOrderProduct(deterministic=True)
    counts = (1, 2, 7, 16, 33, 64, 65, 100, 128, 300, 1000, 2048, 3000)
    check_row_bits(lambda part: run(part, weight, bias), x, counts=counts)
    agreed = [n for n in counts if n > 64 and library_agrees(x[:n], weight, bias)]
    print(f"the library agrees at {agreed} rows")
    assert agreed


@every_dtype
def test_fast_mode_takes_the_library_for_many_rows(dtype: torch.dtype) -> None:
    weight, _ = weights(2, 256, 512, dtype, "cuda")
    x = rows(2, 500, 256, dtype, "cuda")
    run = InOrderProduct(deterministic=False)
    assert torch.equal(run(x, weight, None), F.linear(x, weight))
    assert run(x[:0], weight, None).shape == (0, 512)


@every_dtype
@pytest.mark.parametrize(("width", "out"), [(1024, 72), (4096, 2048), (14336, 4096)])
def test_added_parts(width: int, out: int, dtype: torch.dtype) -> None:
    """Sums in parts are those of the product, but for rounding, and have the same bits at up to 64 rows."""
    weight, _ = weights(0, width, out, dtype, "cuda")
    x = rows(0, 64, width, dtype, "cuda")
    got = added_parts(x, weight)
    tiles = -(-out // 64)
    assert got.shape == (64, 4 if 4 * tiles <= multiprocessors(x.device) else 2, out)
    torch.testing.assert_close(got.sum(1).double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-3)
    check_row_bits(lambda part: added_parts(part, weight), x, counts=(1, 2, 4, 16, 17, 33, 64))
