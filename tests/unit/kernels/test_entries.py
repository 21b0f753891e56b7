"""Entries as they are written to a pool and read from it."""

from __future__ import annotations

import pytest
import torch

from stridelm.kernels import OPS, entries
from stridelm.kernels.plain_fp8 import E4M3
from support.checks.row_ops import HEADS, check_eight_bit_latents, check_eight_bits, sets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_written_is_read(dtype: torch.dtype) -> None:
    """In the model's dtype as it is; in eight bits divided by the scale, limited and rounded; NaN stays NaN."""
    slots, x = torch.tensor([3, 1]), torch.tensor([[1.0, -2.0, 1e6], [0.3, -1e6, float("nan")]], dtype=dtype)
    pool = torch.zeros(5, 3, dtype=dtype)
    entries.write(pool, slots, x)
    assert torch.equal(entries.read(pool, slots).nan_to_num(7), x.nan_to_num(7))
    eight = torch.zeros(5, 3).to(E4M3)
    entries.write(eight, slots, x.to(entries.wide(E4M3, dtype)), 0.5)
    assert entries.read(eight, slots).float().nan_to_num(7).tolist() == [[2.0, -4.0, 448.0], [0.625, -448.0, 7.0]]
    assert not bool(eight.float()[[0, 2, 4]].any())


def test_rounded_once() -> None:
    """A number that bfloat16 would round to the middle of two numbers of eight bits is not rounded there first."""
    assert entries.wide(E4M3, torch.bfloat16) == torch.float32 and entries.wide(torch.bfloat16, torch.bfloat16)
    x, pool = torch.tensor([[1.0626]]), torch.zeros(1, 1).to(E4M3)
    assert float(x.bfloat16().to(E4M3).float()) == 1.0
    entries.write(pool, torch.tensor([0]), x)
    assert float(pool.float()) == 1.125


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", sets("cpu"))
def test_rows_in_eight_bits(name: str, dtype: torch.dtype) -> None:
    ops = OPS.get(name)()
    for sizes in HEADS[::2]:
        check_eight_bits(ops, 5, sizes, dtype, "cpu")
    for interleaved in (False, True):
        check_eight_bit_latents(ops, 5, 9, 40, 8, interleaved, dtype, "cpu")
