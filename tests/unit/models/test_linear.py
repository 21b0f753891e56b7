"""Matrix products for serving: they are close to the exact product, and a row's bits do not depend on other rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from stridelm.kernels.host import simd
from stridelm.kernels.host.product import FewRows
from stridelm.models.fitting import fill
from stridelm.models.layers import products
from stridelm.models.layers.expert_products import ExpertProducts, StoredExperts
from stridelm.models.layers.linear import DENSE, Linear, Stack, WeightFormat, bias_of, bias_slots, set_products
from stridelm.models.layers.products import (
    PACKED,
    PIECES,
    PackedPieces,
    PackedProduct,
    PackedTiles,
    Product,
    Way,
    bfloat16_is_native,
    few_rows,
    keeps_bits,
    padded_product,
    tiled_product,
)
from stridelm.models.layers.slots import WHOLE, ModelPart, Slots, Split, WeightSlot
from stridelm.models.loader import screaming
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
    assert tiled_product(x[:0], weight, bias).shape == (0, shape[1])


@native
@pytest.mark.parametrize("kind", PACKED, ids=["whole", *(f"pieces-of-{height}" for height in PIECES), "tiles"])
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 96), (96, 1024), (384, 1536)], ids=str)
def test_packed(shape: tuple[int, int], kind: Way) -> None:
    """Packed bfloat16 weights, used as they are if this CPU was found to keep bits, and in tiles on any CPU: the same
    bits at 1 to 64 rows, and at hundreds."""
    weight, bias = weights(1, *shape, torch.bfloat16, "cpu")
    product = kind(weight)
    x = rows(1, 64, shape[0], torch.bfloat16, "cpu")
    check_close(product(x, weight, bias), x, weight, bias)
    asked = (weight.shape, weight.dtype)
    if kind is not PackedTiles and not (keeps_bits(kind, *asked, True) and keeps_bits(kind, *asked, False)):
        pytest.skip("this CPU's bits depend on the number of rows: not chosen here")
    check_row_bits(lambda part: product(part, weight, bias), x)
    many = rows(2, 1024, shape[0], torch.bfloat16, "cpu")
    check_row_bits(lambda part: product(part, weight, None), many, counts=(1, 2, 3, 16, 17, 65, 129, 333, 1000))


@native
@pytest.mark.parametrize("shape", [(96, 64), (384, 640), (96, 41), (3072, 96)], ids=str)
def test_few_rows(shape: tuple[int, int]) -> None:
    """Where our kernel for few rows is chosen, its bits are the library's at every number of rows that it takes."""
    weight, bias = weights(1, *shape, torch.bfloat16, "cpu")
    product = PackedProduct(weight)
    few = few_rows(PackedProduct, product, weight.shape, biased=True)
    if few is None:
        pytest.skip("this CPU has neither AMX nor AVX512-BF16, or oneDNN packs the weight in another way")
    x = rows(1, few.max_rows, shape[0], torch.bfloat16, "cpu")
    for count in range(1, few.max_rows + 1):
        assert torch.equal(few(x[:count], bias), product(x[:count], weight, bias))
        assert torch.equal(few(x[:count], None), product(x[:count], weight, None))


@native
def test_a_layer_of_few_outputs_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows that they have few outputs together go through our kernel, more of them do not."""
    layer = Linear(96, 1024).to(torch.bfloat16).requires_grad_(False)
    nn.init.normal_(layer.weight)
    set_products(layer, deterministic=True)
    if not (isinstance(layer.product, PackedProduct) and layer.product.few):
        pytest.skip("this CPU has neither AMX nor AVX512-BF16, or oneDNN packs the weight in another way")
    ran: list[int] = []
    call = FewRows.__call__

    def spied(self: FewRows, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ran.append(len(x))
        return call(self, x, bias)

    monkeypatch.setattr(FewRows, "__call__", spied)
    counts = (1, 4, 5, 16, 40)
    for count in counts:
        layer(rows(0, count, 96, torch.bfloat16, "cpu"))
    assert ran == [count for count in counts if count <= simd.ROWS and count * 1024 <= simd.FEW]


@native
def test_another_packing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that oneDNN packs as our kernel does not read it goes through the library at every number of rows."""
    monkeypatch.setattr(products, "_AGREED", {})
    of = FewRows.of

    def moved(packed: torch.Tensor, shape: torch.Size) -> FewRows | None:
        found = of(packed, shape)
        return found and FewRows(found.weight[::-1].copy(), found.outputs)

    monkeypatch.setattr(FewRows, "of", moved)
    layer = Linear(96, 128).to(torch.bfloat16).requires_grad_(False)
    set_products(layer, deterministic=True)
    assert isinstance(layer.product, PackedProduct)
    assert layer.product.few is None


@native
def test_a_product_that_does_not_keep_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose bits depend on the number of rows, one whose bits depend on a row's place, and the resulting choice."""
    run = PackedProduct.__call__

    def by_number(self: PackedProduct, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return run(self, x, *rest) + (0.5 if x.shape[0] == 5 else 0.0)

    def by_height(self: PackedProduct, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return run(self, x, *rest) + (0.5 if x.shape[0] > 40 else 0.0)

    def by_place(weight: torch.Tensor) -> Product:
        return lambda x, weight, _: tiled_product(x, weight, None) + torch.arange(x.shape[0])[:, None]

    def by_order(weight: torch.Tensor) -> Product:
        """The sum of a single row starts at another element."""
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
    assert type(layer.product) is PackedTiles  # five rows may be a piece of any height
    monkeypatch.setattr(products, "_TRIED", {})
    monkeypatch.setattr(PackedProduct, "__call__", by_height)
    set_products(layer := Linear(96, 64).to(torch.bfloat16).requires_grad_(False), deterministic=True)
    assert type(layer.product) is PackedPieces and layer.product.height == 32
    set_products(fast := Linear(96, 64).to(torch.bfloat16).requires_grad_(False), deterministic=False)
    assert type(fast.product) is PackedProduct


@native
@pytest.mark.parametrize("shape", [(64, 96), (384, 1152), (1024, 96)], ids=str)
def test_padded(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """If weights cannot be packed, a single row runs as two if this CPU was found to keep bits that way, otherwise rows
    run in tiles: the same bits at 1 to 64 rows either way."""
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
                self.head.weight = self.embed.weight  # type: ignore[assignment]

    toy = Toy().to(dtype).requires_grad_(False)
    wanted = toy.head.weight.clone()
    set_products(toy, deterministic=True)
    x = rows(4, 40, 48, dtype, "cpu")
    check_row_bits(toy.head, x)
    check_close(toy.head(x) / 50**0.5, x / 50**0.5, wanted, None)
    assert toy.embed.weight.shape == (50, 48)


def test_fast_mode_is_the_library() -> None:
    """Without that guarantee float32 goes through the library unchanged."""
    model = nn.Sequential(Linear(8, 8))
    set_products(model, deterministic=False)
    assert model[0].product is torch.nn.functional.linear


# Formats and shares

FUSED = {"q": 16, "k": 8, "v": 8}


class RowScaled:
    """Rows in eight bits, each with a scale: a format with two tensors per matrix."""

    name = "row-scaled"
    replaceable: ClassVar[bool] = False
    kept = frozenset(("weight", "weight_scale"))

    def parameters(self, stack: Stack) -> dict[str, nn.Parameter | None]:
        out_features, in_features = stack.out_features, stack.in_features
        return {
            "weight": nn.Parameter(torch.empty(out_features, in_features, dtype=torch.int8), requires_grad=False),
            "weight_scale": nn.Parameter(torch.empty(out_features, 1, dtype=torch.float32)),
            "bias": bias_of(stack),
        }

    def slots(self, stack: Stack, start: int, stop: int) -> Slots:
        of_rows = stack.split if stack.split.dim == 0 else WHOLE
        yield "weight", WeightSlot("weight", start, stop, stack.split)
        yield "weight_scale", WeightSlot("weight_scale", start, stop, of_rows)
        yield from bias_slots(stack, start, stop)

    def check(self, device: torch.device) -> None:
        pass

    @staticmethod
    def plain(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.linear(x, (weight * scale).to(x.dtype), bias)

    @staticmethod
    def tiled(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return tiled_product(x, (weight * scale).to(x.dtype), bias)

    def product(self, layer: Linear, *, deterministic: bool, shared: bool) -> Product | None:
        return self.tiled if deterministic else self.plain

    def plain_experts(self, layer: StoredExperts) -> ExpertProducts:
        raise NotImplementedError

    def experts(self, layer: StoredExperts, *, deterministic: bool) -> ExpertProducts:
        raise NotImplementedError


class Loose(RowScaled):
    """Makes no promise about a row's bits."""

    def product(self, layer: Linear, *, deterministic: bool, shared: bool) -> Product | None:
        return None if deterministic else self.plain


def stored(form: WeightFormat, outs: dict[str, int]) -> dict[str, torch.Tensor]:
    """A checkpoint of matrices with 24 input features."""
    numbers = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in outs.items():
        tensors[f"{name}.bias"] = torch.randn(size, generator=numbers, dtype=torch.float64)
        tensors[f"{name}.weight"] = torch.randn(size, 24, generator=numbers, dtype=torch.float64)
        if isinstance(form, RowScaled):
            tensors[f"{name}.weight"] = torch.randint(-9, 9, (size, 24), generator=numbers, dtype=torch.int8)
            tensors[f"{name}.weight_scale"] = torch.rand(size, 1, generator=numbers)
    return tensors


def loaded(form: WeightFormat, outs: dict[str, int], split: Split = WHOLE) -> Linear:
    """Such a checkpoint in a float64 layer, loaded as the loader does."""
    with torch.device("meta"):
        layer = Linear(24, outs, bias=True, weight_format=form, split=split)
    layer = screaming(layer, torch.float64, torch.device("cpu")).requires_grad_(False)
    held = {name for name, _ in layer.slots()}
    fill(layer, iter(stored(form, outs).items()), Path("x"), lambda name: name not in held)
    return layer


@pytest.mark.parametrize("outs", [{"o": 10}, FUSED], ids=["one", "fused"])
@pytest.mark.parametrize("form", [DENSE, RowScaled()], ids=["dense", "row-scaled"])
def test_shares(form: WeightFormat, outs: dict[str, int]) -> None:
    """Two layers with half of the rows each give the whole's outputs, matrix by matrix; two with half of the columns
    each give outputs that add up to them."""
    x = rows(7, 5, 24, torch.float64, "cpu")
    whole = loaded(form, outs)(x)
    of_rows = [loaded(form, outs, Split(0, rank, 2))(x).split([n // 2 for n in outs.values()], 1) for rank in (0, 1)]
    torch.testing.assert_close(torch.cat([part for pair in zip(*of_rows) for part in pair], 1), whole)
    of_columns = [loaded(form, outs, Split(1, rank, 2))(half) for rank, half in enumerate(x.chunk(2, 1))]
    torch.testing.assert_close(of_columns[0] + of_columns[1], whole)
    with pytest.raises(ValueError, match="24 features cannot be cut into 5 equal shares"):
        Linear(24, 10, split=Split(1, 0, 5))


def test_a_share_is_of_a_whole_tensor() -> None:
    """Shapes are checked against the whole tensor: one of half the size does not pass as a half."""
    layer = Linear(24, {"o": 10}, split=Split(0, 0, 2))
    with pytest.raises(ValueError, match=r"misshapen: o.weight is \[5, 24\], config.json says \[10, 24\]"):
        fill(layer, iter({"o.weight": torch.zeros(5, 24)}.items()), Path("x"))


def test_another_format() -> None:
    """Its tensors are loaded as they are, for each of the fused matrices; it multiplies, and keeps a row's bits."""
    layer, tensors = loaded(RowScaled(), FUSED), stored(RowScaled(), FUSED)
    assert (layer.weight.dtype, layer.get_parameter("weight_scale").dtype) == (torch.int8, torch.float32)
    weight = torch.cat([tensors[f"{n}.weight"] * tensors[f"{n}.weight_scale"] for n in FUSED]).double()
    bias = torch.cat([tensors[f"{n}.bias"] for n in FUSED])
    x = rows(8, 40, 24, torch.float64, "cpu")
    set_products(layer, deterministic=True)
    check_row_bits(layer, x)
    check_close(layer(x), x, weight, bias)
    with pytest.raises(ValueError, match=r"cannot have: o.weight \(torch.float32\)"):
        fill(Linear(24, {"o": 8}, weight_format=RowScaled()), iter({"o.weight": torch.ones(8, 24)}.items()), Path("x"))


class Unknown(nn.Module):
    """A module without a promise about its arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Silent(ModelPart):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (Unknown(), "Unknown"),
        (nn.Linear(2, 2), "Linear"),
        (Silent(), "Silent"),
        (Linear(2, 2, weight_format=Loose()), "Loose"),
    ],
)
def test_what_makes_no_promise_is_refused(part: nn.Module, kind: str) -> None:
    """A module or format that does not promise a row's bits is named if they are required, and accepted otherwise."""
    model = nn.ModuleDict({"known": Linear(2, 2), "other": nn.ModuleList([part])})
    set_products(model, deterministic=False)
    with pytest.raises(ValueError, match=rf"other\.0 \({kind}\) does not promise .*; set deterministic=False"):
        set_products(model, deterministic=True)
