"""The library's products in eight bits, with a library by definition that refuses what the real one refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels import agreement, fp8_library
from stridelm.kernels.fp8 import product
from stridelm.kernels.plain_fp8 import form_of, plain_product, quantise, widened_rows
from stridelm.kernels.row_forms import QuantisedRows, RowForm
from stridelm.models.layers.fp8 import FP8Product
from support.checkpoints.fp8 import BLOCK, FORMS, SUMS
from support.checks.fp8 import ROW_FORMS, Case, check_product
from support.doubles.interpreter import INTERPRETED

by_sum = pytest.mark.parametrize("form", SUMS)


class Library:
    """torch's scaled_mm: layouts as cuBLASLt documents them for blocks, products by definition."""

    def __init__(self) -> None:
        self.calls = 0
        self.error = 0.0

    def __call__(
        self,
        a_MK: torch.Tensor,
        b_KN: torch.Tensor,
        a_scale: torch.Tensor,
        a_recipe: F.ScalingType,
        b_scale: torch.Tensor,
        b_recipe: F.ScalingType,
        *,
        bias: torch.Tensor | None,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        (m, k), n = a_MK.shape, b_KN.shape[1]
        assert a_MK.is_contiguous() and b_KN.t().is_contiguous()
        blocks = a_recipe is F.ScalingType.BlockWise1x128 and b_recipe is F.ScalingType.BlockWise128x128
        if blocks:
            assert m % 4 == 0 and a_scale.shape == (m, k // BLOCK) and a_scale.stride() == (1, m)
            assert (k // BLOCK) % 4 == 0 and b_scale.shape == (k // BLOCK, -(-n // BLOCK))
            assert b_scale.stride() == (1, k // BLOCK)
        else:
            assert a_recipe is b_recipe is F.ScalingType.RowWise
            assert a_scale.shape == (m, 1) and b_scale.shape == (1, n)
        self.calls += 1
        form = RowForm.BLOCKS if blocks else RowForm.WHOLE
        rows = QuantisedRows(a_MK, a_scale.t().contiguous(), output_dtype, form)
        return plain_product(rows, b_KN.t(), b_scale.t().contiguous(), bias) + self.error


def in_order(a_MK: Any, b_KN: Any, a_scale: Any, _: Any, b_scale: Any, *__: Any, bias: Any, output_dtype: Any) -> Any:
    """The library by block, which here adds as the kernel does, since it is the kernel."""
    rows = QuantisedRows(a_MK, a_scale.t().contiguous(), output_dtype, RowForm.BLOCKS)
    return product(rows, b_KN.t(), b_scale.t().contiguous(), bias)


def flipped(
    x: QuantisedRows, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> tuple[QuantisedRows, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same product, whose blocks are added last to first."""

    def by_block(q: torch.Tensor) -> torch.Tensor:
        return q.view(torch.uint8).unflatten(1, (-1, BLOCK)).flip(1).flatten(1).view(q.dtype)

    rows = QuantisedRows(by_block(x.q_NI), x.scales_SN.flip(0), x.dtype, x.form)
    return rows, by_block(weight), scale.flip(1), bias


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(F, "scaled_mm", library)
    monkeypatch.setattr(agreement, "_AGREED", {})
    return library


@by_sum
@pytest.mark.parametrize("count", [1, 65, 66, 68])
def test_product(library: Library, count: int, form: str) -> None:
    """Of any number of rows, with and without a bias."""
    case = Case(count, 1024, (256, 72), form, torch.bfloat16)
    case.scale = case.scale[:: BLOCK // case.group] if form == "block" else case.scale

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return fp8_library.multiply(quantise(x, form_of(scale)), weight, scale, bias)

    check_product(case, run)
    assert library.calls == 2


@by_sum
def test_padded(form: str) -> None:
    """Rows stay as they are, and those below are zeros."""
    x = quantise(Case(6, 384, (64,), form, torch.bfloat16).x, ROW_FORMS[form])
    got = fp8_library.padded(x, 4)
    assert got.shape == (8, 384) and got.form is x.form and got.dtype is x.dtype
    assert torch.equal(widened_rows(got)[:6], widened_rows(x))
    assert not bool(widened_rows(got)[6:].any())
    assert fp8_library.padded(got, 4) is got


@INTERPRETED
@pytest.mark.parametrize("form", FORMS)
def test_many_rows_alone_take_the_library(library: Library, form: str) -> None:
    case = Case(70, 512, (128,), form, torch.bfloat16)
    run = FP8Product(ROW_FORMS[form], torch.zeros(8, dtype=torch.int32), library=True)
    asked: tuple[Any, ...] = case.weight, case.scale, None
    run(case.x[:64], *asked)
    assert library.calls == 0
    check_product(case, run)
    assert library.calls == 2
    run(quantise(case.x, ROW_FORMS[form]), *asked)
    assert library.calls == 3
    FP8Product(ROW_FORMS[form], None, library=False)(case.x, *asked)
    assert library.calls == 3


@INTERPRETED
@pytest.mark.parametrize("form", ["block", "powers"])
def test_equal_bits_are_tried(library: Library, form: str) -> None:
    """If bits must not depend on the number of rows, the library runs where it gives the kernel's, as tried once."""
    case = Case(66, 1024, (128,), form, torch.bfloat16)
    run, asked = FP8Product(ROW_FORMS[form], None, library=True), (case.weight, case.scale, None)
    ours = FP8Product(ROW_FORMS[form], None, library=False)(case.x, *asked)
    library.error = 0.5
    assert torch.equal(run(case.x, *asked), ours) and library.calls == 1
    assert torch.equal(run(case.x, *asked), ours) and library.calls == 1


@INTERPRETED
@pytest.mark.parametrize("biased", [False, True])
def test_a_sum_in_another_order_is_noticed(library: Library, monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    """Where it matters only to the rounding."""
    case = Case(66, 1024, (128,), "block", torch.bfloat16)
    x, bias = quantise(case.x, RowForm.BLOCKS), 1000 * case.bias if biased else None
    monkeypatch.setattr(F, "scaled_mm", in_order)
    assert fp8_library.agrees(x, case.weight, bias)
    monkeypatch.setattr(agreement, "_AGREED", {})
    monkeypatch.setattr(fp8_library, "product", lambda *asked: product(*flipped(*asked)))
    assert not fp8_library.agrees(x, case.weight, bias)


@INTERPRETED
def test_by_channel_never_agrees(library: Library) -> None:
    case = Case(66, 1024, (128,), "channel", torch.bfloat16)
    run, asked = FP8Product(RowForm.WHOLE, None, library=True), (case.weight, case.scale, None)
    assert torch.equal(run(case.x, *asked), FP8Product(RowForm.WHOLE, None, library=False)(case.x, *asked))
    assert library.calls == 0
