"""A matrix for each head: applied from either side, close to the exact product, and row-invariant where promised."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from stridelm.models.layers.head_linear import HeadLinear
from stridelm.models.layers.linear import set_products
from stridelm.models.layers.slots import WHOLE, Split
from support.checks.linear import check_row_bits

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def made(dtype: torch.dtype, split: Split = WHOLE) -> HeadLinear:
    layer = HeadLinear("kv_b_proj", 6, 40, (24, 16), split).to(dtype).requires_grad_(False)
    layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0)) / 40**0.5)
    return layer


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_both_sides(dtype: torch.dtype, deterministic: bool) -> None:
    layer = made(dtype)
    set_products(layer, deterministic=deterministic)
    weight = layer.weight.double().view(6, 40, 40)
    generator = torch.Generator().manual_seed(1)
    for part, (first, size) in enumerate(((0, 24), (24, 16))):
        matrices = weight[:, first : first + size]
        inner, outer = (torch.randn(37, 6, width, generator=generator).to(dtype) for width in (40, size))
        got, turned = layer(part, inner), layer.transposed(part, outer)
        assert got.dtype == turned.dtype == dtype
        wanted = torch.einsum("nhi,hoi->nho", inner.double(), matrices)
        assert torch.allclose(got.double(), wanted, atol=CLOSE[dtype])
        wanted = torch.einsum("nho,hoi->nhi", outer.double(), matrices)
        assert torch.allclose(turned.double(), wanted, atol=CLOSE[dtype])
        if deterministic:
            check_row_bits(partial(layer, part), inner)
            check_row_bits(partial(layer.transposed, part), outer)


def test_shares_are_heads() -> None:
    """A rank has whole heads, and a number of them that cannot be divided is refused."""
    (name, slot), *others = made(torch.float32, Split(0, 1, 3)).slots("self_attn.")
    assert name == "self_attn.kv_b_proj.weight" and not others
    assert (slot.start, slot.stop, slot.split) == (0, 2 * 40, Split(0, 1, 3))
    with pytest.raises(ValueError, match="6 features cannot be cut into 4 equal shares"):
        made(torch.float32, Split(0, 0, 4))
