"""Checks of products in eight bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stridelm.kernels.fp8 import product, quantise
from stridelm.kernels.plain import PlainOps
from stridelm.kernels.plain_fp8 import quantised_rows
from stridelm.kernels.products import Tile
from support.checkpoints.fp8 import BLOCK, by_definition
from support.checks.linear import rows
from support.checks.row_ops import noise
from support.oracles.fp8 import rows_by_definition, widened

TILES = (
    Tile(64, 16, BLOCK, warps=4, stages=4),
    Tile(128, 16, BLOCK, warps=4, stages=4),
    Tile(64, 32, BLOCK, warps=4, stages=3),
    Tile(64, 64, BLOCK, warps=4, stages=4),
    Tile(64, 128, BLOCK, warps=4, stages=3),
    Tile(64, 128, BLOCK, warps=8, stages=4),
    Tile(128, 64, BLOCK, warps=4, stages=4),
    Tile(128, 128, BLOCK, warps=8, stages=4),
)
"""Tiles of every kind that `choose_tile` may choose."""
EPS = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-18}
"""How far a result may lie from the exact one, beside its rounding: the kernels sum in float32."""


class Case:
    """Random rows, and a weight by definition: matrices of `outs` features each, one below the other."""

    def __init__(
        self, count: int, inputs: int, outs: tuple[int, ...], form: str, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.form, self.dtype = form, dtype
        self.x = rows(count, count, inputs, dtype, device)
        spread = torch.linspace(-3, 3, inputs, device=device).exp()  # blocks of different magnitudes
        self.x = (self.x.float() * spread).to(dtype)
        matrices = [noise(i, out, inputs, dtype=torch.float32, device="cpu") for i, out in enumerate(outs)]
        stored, scales = zip(*(by_definition(matrix * (i + 1), form) for i, matrix in enumerate(matrices)))
        self.exact = torch.cat([widened(*pair, form) for pair in zip(stored, scales)]).to(device)
        self.weight = torch.cat(stored).to(device)
        self.group = 1
        if form == "block":
            while self.group < BLOCK and all(out % (2 * self.group) == 0 for out in outs[:-1]):
                self.group *= 2
            repeat = BLOCK // self.group
            scales = tuple(s.repeat_interleave(repeat, 0)[: -(-out // self.group)] for s, out in zip(scales, outs))
        self.scale = torch.cat(scales).to(device)
        self.bias = noise(9, sum(outs), dtype=torch.float32, device=device).to(dtype)

    def wanted(self, bias: bool) -> torch.Tensor:
        """In float64."""
        made = rows_by_definition(self.x.double(), self.form) @ self.exact.t()
        return made + self.bias.double() if bias else made

    def close(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        size = float(wanted.abs().max())
        assert got.dtype == self.dtype
        torch.testing.assert_close(got.double(), wanted, rtol=EPS[self.dtype], atol=size * 1e-5)


Run = Callable[..., torch.Tensor]


def check_quantised(count: int, inputs: int, form: str, dtype: torch.dtype, device: str) -> None:
    """The kernel's numbers and scales are those of the definition, bit for bit; zeros stay zeros."""
    case = Case(count, inputs, (64,), form, dtype, device)
    case.x[-1] = 0
    by_block = form == "block"
    q, scales = quantise(case.x, by_block)
    width = BLOCK if by_block else inputs
    each = scales.t().repeat_interleave(width, 1)[:, :inputs]
    assert torch.equal(q.float() * each, quantised_rows(case.x, by_block=by_block))
    assert not bool(q[-1].float().any())


def check_product(case: Case, run: Run = product) -> None:
    """The result is the product by definition, with and without a bias."""
    for bias in (None, case.bias):
        case.close(run(case.x, case.weight, case.scale, bias), case.wanted(bias is not None))


def check_gated(case: Case, activation: str) -> None:
    """The result is the gate applied to the product, which is rounded before it."""
    for bias in (None, case.bias):
        wanted = PlainOps().gate(product(case.x, case.weight, case.scale, bias).float(), activation)
        got = product(case.x, case.weight, case.scale, bias, activation)
        torch.testing.assert_close(got.float(), wanted, rtol=1.1 * torch.finfo(case.dtype).eps, atol=1e-4)


def check_tiles(case: Case) -> None:
    """All tiles add in the same order, gated or not."""
    whole, gated = (product(case.x, case.weight, case.scale, case.bias, how, tile=TILES[0]) for how in (None, "silu"))
    for tile in TILES[1:]:
        assert torch.equal(product(case.x, case.weight, case.scale, case.bias, tile=tile), whole), tile
        if tile.outputs == 64:
            again = product(case.x, case.weight, case.scale, case.bias, "silu", tile=tile)
            assert torch.equal(again, gated), tile
