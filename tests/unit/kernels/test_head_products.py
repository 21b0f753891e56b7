"""Products by heads in Triton, run by its interpreter: close to float64, and a row's bits do not depend on others."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels.head_products import head_products
from support.checks.linear import check_row_bits
from support.doubles.interpreter import INTERPRETED

pytestmark = INTERPRETED
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-2}  # the interpreter has no bfloat16 products


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(2, 128, 70), (3, 20, 8), (1, 64, 128), (1, 300, 40)])
def test_products(heads: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Matrices and transposed ones, over a part of wider rows, for fewer rows than a tile holds and for more."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(heads, inputs, outputs, generator=generator) / inputs**0.5
    x = torch.randn(70, heads, inputs + 4, generator=generator).to(dtype)[..., :inputs]
    wanted = torch.einsum("nha,hao->nho", x.double(), weight.to(dtype).double())
    for given in (weight.to(dtype), weight.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)):
        got = head_products(x, given)
        assert got.dtype == dtype and torch.allclose(got.double(), wanted, atol=CLOSE[dtype])
        check_row_bits(partial(head_products, weight_HAO=given), x, counts=(1, 2, 16, 17, 70))
    assert head_products(x[:0], weight.to(dtype)).shape == (0, heads, outputs)
