"""Matrix products for serving: they are products, and a row does not know what runs beside it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from stridelm.models.layers import products
from stridelm.models.layers.linear import Linear, set_products
from stridelm.models.layers.products import (
    PackedProduct,
    PackedTiles,
    Product,
    bfloat16_is_native,
    keeps_bits,
    padded_product,
    tiled_product,
)
from support.checks.linear import check_close, check_row_bits, rows, weights

native = pytest.mark.skipif(not bfloat16_is_native(), reason="this CPU does not multiply bfloat16 itself")
SHAPES = [(random.Random(seed).randrange(1, 700), random.Random(-seed).randrange(1, 500)) for seed in range(1, 7)]
"""(input width, output width), odd ones too."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 96), (96, 1024)], ids=str)
def test_tiles(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Fixed tiles: the same bits at 1 to 64 rows, in every dtype."""
    weight, bias = weights(0, *shape, dtype, "cpu")
    x = rows(0, 64, shape[0], dtype, "cpu")
    check_row_bits(lambda part: tiled_product(part, weight, bias), x)
    check_close(tiled_product(x, weight, bias), x, weight, bias)
    check_close(tiled_product(x, weight, None), x, weight, None)


@native
@pytest.mark.parametrize("kind", [PackedProduct, PackedTiles])
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 96), (96, 1024), (384, 1536)], ids=str)
def test_packed(shape: tuple[int, int], kind: type[PackedProduct]) -> None:
    """Packed bfloat16 weights, as they are where this CPU was seen to keep bits and in tiles anywhere: the same bits at
    1 to 64 rows, and at hundreds."""
    weight, bias = weights(1, *shape, torch.bfloat16, "cpu")
    product = kind(weight)
    x = rows(1, 64, shape[0], torch.bfloat16, "cpu")
    check_close(product(x, weight, bias), x, weight, bias)
    asked = (weight.shape, weight.dtype)
    if kind is PackedProduct and not (keeps_bits(kind, *asked, True) and keeps_bits(kind, *asked, False)):
        pytest.skip("this CPU's bits depend on the number of rows: not chosen here")
    check_row_bits(lambda part: product(part, weight, bias), x)
    many = rows(2, 1024, shape[0], torch.bfloat16, "cpu")
    check_row_bits(lambda part: product(part, weight, None), many, counts=(1, 2, 3, 16, 17, 65, 129, 333, 1000))


@native
def test_a_product_that_does_not_keep_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose bits depend on the number of rows, one whose bits depend on a row's place, and what is chosen then."""
    run = PackedProduct.__call__

    def by_number(self: PackedProduct, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return run(self, x, *rest) + (0.5 if x.shape[0] == 5 else 0.0)

    def by_place(weight: torch.Tensor) -> Product:
        return lambda x, weight, _: tiled_product(x, weight, None) + torch.arange(x.shape[0])[:, None]

    def by_order(weight: torch.Tensor) -> Product:
        """A lone row's sum begins elsewhere."""
        roped = torch.cat([weight[:, 48:], weight[:, :48]], dim=1)
        return lambda x, weight, _: tiled_product(
            x if len(x) > 1 else torch.cat([x[:, 48:], x[:, :48]], dim=1), weight if len(x) > 1 else roped, None
        )

    def tiles(weight: torch.Tensor) -> Product:
        return tiled_product

    asked = (torch.Size((64, 96)), torch.bfloat16, False)
    assert [keeps_bits(way, *asked) for way in (tiles, by_place, by_order)] == [True, False, False]
    monkeypatch.setattr(products, "_TRIED", {})
    monkeypatch.setattr(PackedProduct, "__call__", by_number)
    layer = Linear(96, 64).to(torch.bfloat16).requires_grad_(False)
    set_products(layer, deterministic=True)
    assert type(layer.product) is PackedTiles
    set_products(fast := Linear(96, 64).to(torch.bfloat16).requires_grad_(False), deterministic=False)
    assert type(fast.product) is PackedProduct


@native
@pytest.mark.parametrize("shape", [(64, 96), (384, 1152), (1024, 96)], ids=str)
def test_padded(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights cannot be packed, a lone row runs as two if this CPU was seen to keep bits so, and else rows run in
    tiles: the same bits at 1 to 64 rows either way."""
    monkeypatch.setattr(products, "_native_ways", lambda: (products._padded,))
    weight, bias = weights(2, *shape, torch.bfloat16, "cpu")
    x = rows(3, 64, shape[0], torch.bfloat16, "cpu")
    layer = Linear(*shape, bias=True).to(torch.bfloat16).requires_grad_(False)
    layer.weight, layer.bias = (nn.Parameter(values, requires_grad=False) for values in (weight, bias))
    set_products(layer, deterministic=True)
    kept = keeps_bits(products._padded, weight.shape, weight.dtype, True)
    assert layer.product is (padded_product if kept else tiled_product)
    check_row_bits(layer, x)
    check_close(padded_product(x[:1], weight, bias), x[:1], weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_chosen_for_serving(tied: bool, dtype: torch.dtype) -> None:
    """Whatever `set_products` chooses under `deterministic` keeps a row's bits, and an embedding stays readable."""

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 48)
            self.head = Linear(48, 50)
            nn.init.normal_(self.head.weight)
            if tied:
                self.head.weight = self.embed.weight

    toy = Toy().to(dtype).requires_grad_(False)
    wanted = toy.head.weight.clone()
    set_products(toy, deterministic=True)
    x = rows(4, 40, 48, dtype, "cpu")
    check_row_bits(toy.head, x)
    check_close(toy.head(x) / 50**0.5, x / 50**0.5, wanted, None)
    assert toy.embed.weight.shape == (50, 48)


def test_fast_mode_is_the_library() -> None:
    """Without the promise float32 goes through the library as it is."""
    model = nn.Sequential(Linear(8, 8))
    set_products(model, deterministic=False)
    assert model[0].product is torch.nn.functional.linear
