"""Checks of the products that add in a fixed order."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F

from stridelm.kernels import products
from stridelm.kernels.plain import PlainOps
from stridelm.kernels.products import Tile, product
from support.checks.linear import rows, weights

TILES = (
    Tile(64, 16, 256, warps=4, stages=4),
    Tile(64, 32, 256, warps=4, stages=4),
    Tile(64, 16, 128, warps=4, stages=6),
    Tile(128, 16, 128, warps=4, stages=4),
    Tile(64, 32, 64, warps=4, stages=3),
    Tile(64, 64, 128, warps=4, stages=4),
    Tile(128, 64, 64, warps=8, stages=4),
    Tile(64, 128, 64, warps=4, stages=4),
    Tile(128, 128, 64, warps=8, stages=4),
)
"""Tiles of every kind that `choose_tile` may choose."""


def check_product(count: int, width: int, out: int, dtype: torch.dtype, device: str) -> None:
    """The result is the product, with and without a bias, rounded once."""
    weight, bias = weights(width, width, out, dtype, device)
    x = rows(count, count, width, dtype, device)
    for added in (None, bias):
        wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
        torch.testing.assert_close(product(x, weight, added).double(), wanted, rtol=eps(dtype), atol=1e-4)


def check_gated(count: int, width: int, out: int, dtype: torch.dtype, device: str, activation: str) -> None:
    """The result is the gate applied to the product, which is rounded before it."""
    weight, bias = weights(width, width, 2 * out, dtype, device)
    x = rows(count, count, width, dtype, device)
    for added in (None, bias):
        wanted = PlainOps().gate(product(x, weight, added).float(), activation)
        got = product(x, weight, added, activation)
        assert got.shape == (count, out)
        torch.testing.assert_close(got.float(), wanted, rtol=eps(dtype), atol=1e-4)


def check_given(count: int, width: int, out: int, dtype: torch.dtype, device: str, activation: str) -> None:
    """The result is the gate of the product, times what is given in rows that lie apart, with the same bits beside any
    rows."""
    weight, _ = weights(width, width, out, dtype, device)
    x, given = rows(count, count, width, dtype, device), rows(1, count, 3 * out, dtype, device)[:, out : 2 * out]
    wanted = PlainOps().gate(product(x, weight, None).float(), activation, given.float())
    got = product(x, weight, None, activation, given)
    assert got.shape == (count, out) and got.dtype == dtype
    torch.testing.assert_close(got.float(), wanted, rtol=eps(dtype), atol=1e-4)
    assert torch.equal(product(x[-1:], weight, None, activation, given[-1:]), got[-1:])


def by_tile(x: torch.Tensor, weight: torch.Tensor, tile: Tile, activation: str | None = None) -> torch.Tensor:
    """The product in tiles of the given shape."""
    with mock.patch.object(products, "choose_tile", return_value=tile):
        return product(x, weight, None, activation)


def eps(dtype: torch.dtype) -> float:
    """The error of rounding once, with a small margin."""
    return 1.1 * torch.finfo(dtype).eps
