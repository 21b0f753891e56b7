"""Products that add in a fixed order, through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels.products import Tile, can_multiply, choose_tile
from support.checks.compiled import compiled
from support.checks.linear import rows, weights
from support.checks.products import TILES, by_tile, check_gated, check_given, check_product, eps
from support.doubles.interpreter import INTERPRETED

DTYPE = torch.float16  # the interpreter has no bfloat16 products
SHAPES = [(1, 64, 96), (5, 200, 130), (16, 48, 64), (33, 128, 40), (70, 64, 100)]
"""Rows, inputs, outputs: full tiles and partial ones."""


@INTERPRETED
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(shape: tuple[int, int, int]) -> None:
    check_product(*shape, DTYPE, "cpu")


@INTERPRETED
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_gated(shape: tuple[int, int, int], activation: str) -> None:
    check_gated(*shape, DTYPE, "cpu", activation)


@INTERPRETED
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_given(shape: tuple[int, int, int], activation: str) -> None:
    check_given(*shape, DTYPE, "cpu", activation)


@INTERPRETED
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(tile: Tile) -> None:
    """Every tile shape covers all rows and outputs."""
    weight, _ = weights(0, 96, 150, DTYPE, "cpu")
    x = rows(0, 131, 96, DTYPE, "cpu")
    wanted = x.double() @ weight.double().t()
    torch.testing.assert_close(by_tile(x, weight, tile).double(), wanted, rtol=eps(DTYPE), atol=1e-4)


def test_what_can_be_multiplied() -> None:
    """16-bit weights whose rows begin at multiples of 16 bytes."""
    assert can_multiply(torch.zeros(4, 24, dtype=torch.bfloat16))
    assert not can_multiply(torch.zeros(4, 24))
    assert not can_multiply(torch.zeros(4, 20, dtype=torch.bfloat16))
    assert not can_multiply(torch.zeros(24, 16, dtype=torch.bfloat16).t())


def test_tiles_fit_the_shared_memory_of_a_processor() -> None:
    """227 KiB, for weights and rows of every stage."""
    for count in (1, 16, 17, 33, 64, 65, 5000):
        for outputs in (64, 4096, 28672, 128256):
            for is_gated in (False, True):
                tile = choose_tile(count, outputs, is_gated, torch.device("cpu"))
                stage = (tile.outputs * (1 + is_gated) + tile.rows) * tile.inputs * 2
                assert stage * tile.stages <= 227 * 1024


def test_products_on_hopper(tmp_path: Path) -> None:
    """For compute capability 9.0 all forms compile, ask for weights before they wait, and fit into registers."""
    kernels = compiled("product_compiles", tmp_path)
    assert [kernel["gated"] for kernel in kernels] == [False, False, False, True] * 4
    assert not any(kernel["stack"] for kernel in kernels)
