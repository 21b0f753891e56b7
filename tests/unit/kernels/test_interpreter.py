"""Triton's interpreter as the tests run it: its arithmetic is as row-invariant as the laws require of kernels."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from support.doubles.interpreter import INTERPRETED, product

pytestmark = INTERPRETED
COUNTS = (1, 2, 3, 4, 7, 8, 13, 16, 31, 64)
"""Numbers of rows. Libraries use one loop for few rows, and another for the remainder of a division."""
INPUTS, OUTPUTS = 96, 64


@triton.jit
def _multiply(x, weight, out, ROWS: tl.constexpr, K: tl.constexpr, B: tl.constexpr, TURNED: tl.constexpr):
    row, k, b = tl.arange(0, ROWS), tl.arange(0, K), tl.arange(0, B)
    weight_BK = tl.load(weight + b[:, None] * K + k[None, :])
    if TURNED:
        x_KR = tl.load(x + k[:, None] + row[None, :] * K)
        product_RB = tl.trans(tl.dot(weight_BK, x_KR))
    else:
        product_RB = tl.dot(tl.load(x + row[:, None] * K + k[None, :]), tl.trans(weight_BK))
    tl.store(out + row[:, None] * B + b[None, :], product_RB)


@triton.jit
def _add(x, out, ROWS: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr):
    row, k = tl.arange(0, ROWS), tl.arange(0, K)
    if TURNED:
        sum_R = tl.sum(tl.load(x + k[:, None] + row[None, :] * K), 0)
    else:
        sum_R = tl.sum(tl.load(x + row[:, None] * K + k[None, :]), 1)
    tl.store(out + row, sum_R)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("turned", [False, True])
def test_a_products_row_is_its_own(turned: bool) -> None:
    """A row of tl.dot has the same bits whatever the number of rows beside it, on either side of the product."""
    x, weight = noise(64, 128), noise(64, 128, seed=1)
    found = {}
    for count in (16, 32, 64):
        found[count] = torch.empty(count, 64)
        _multiply[(1,)](x, weight, found[count], count, 128, 64, turned)
    assert all(torch.equal(rows, found[64][:count]) for count, rows in found.items())
    torch.testing.assert_close(found[64], x @ weight.t(), rtol=1e-5, atol=1e-4)


def test_a_sums_row_is_its_own() -> None:
    """A row of tl.sum has the same bits whatever is beside it, and along whichever axis it lies."""
    x, found = noise(64, 128), []
    for turned in (False, True):
        for count in (1, 2, 16, 64):
            out = torch.empty(count)
            _add[(1,)](x, out, count, 128, turned)
            found.append(out)
    assert all(torch.equal(out, found[3][: len(out)]) for out in found)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_products_of_any_height_and_layout(dtype: type[np.floating[Any]]) -> None:
    """The same for the product itself, with heights that no tile has, and rows with gaps between them."""
    x, weight = noise(64, 2 * INPUTS).numpy().astype(dtype), noise(INPUTS, OUTPUTS, seed=1).numpy().astype(dtype)
    start = noise(64, OUTPUTS, seed=2).numpy()
    wide, whole = x[:, ::2], product(x[:, ::2], weight, start)
    exact = start.astype(np.float64) + wide.astype(np.float64) @ weight.astype(np.float64)
    np.testing.assert_allclose(whole, exact, rtol=1e-5, atol=1e-4)
    for count in COUNTS:
        for rows in (wide[:count], np.ascontiguousarray(wide[:count]), np.asfortranarray(wide[:count])):
            for weights in (weight, np.asfortranarray(weight)):
                assert np.array_equal(product(rows, weights, start[:count]), whole[:count])
