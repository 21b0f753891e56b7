"""Checks of products in eight bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stridelm.kernels import fp8, plain_fp8
from stridelm.kernels.fp8 import choose_tile, gated_product, left_in_parts, no_arrivals, number_of_parts
from stridelm.kernels.ops import Ops, Parts, Routing
from stridelm.kernels.plain import PlainOps
from stridelm.kernels.plain_fp8 import form_of
from stridelm.kernels.products import Tile
from stridelm.kernels.quantise import quantise, quantised
from stridelm.kernels.row_forms import QuantisedRows, RowForm, Rows, dense_of
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.fitting import fill
from stridelm.models.layers.block import Site
from stridelm.models.layers.expert_products import ExpertProducts, ExpertsInput
from stridelm.models.layers.experts import Experts, MixtureSpec
from stridelm.models.layers.fp8 import BY_BLOCK, BY_BLOCK_POWERS, BY_CHANNEL, FP8Product
from stridelm.models.layers.products import ones_of_parts
from stridelm.models.layers.rope import Ropes
from stridelm.models.loader import screaming
from support.checkpoints.fp8 import BLOCK, SCALES, by_definition
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
    Tile(64, 8, 2 * BLOCK, warps=4, stages=5),
    Tile(64, 16, 2 * BLOCK, warps=4, stages=4),
    Tile(128, 8, 2 * BLOCK, warps=8, stages=3),
    Tile(128, 16, 2 * BLOCK, warps=8, stages=3),
    Tile(64, 32, 2 * BLOCK, warps=4, stages=3),
    Tile(64, 8, 4 * BLOCK, warps=4, stages=2),
    Tile(64, 16, 4 * BLOCK, warps=4, stages=2),
)
"""Tiles of every kind that `choose_tile` may choose, and of several blocks."""
EPS = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-18}
"""How far a result may lie from the exact one, beside its rounding: the kernels sum in float32."""


class Case:
    """Random rows, and a weight by definition: matrices of `outs` features each, one below the other."""

    def __init__(
        self, count: int, inputs: int, outs: tuple[int, ...], form: str, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.form, self.powers, self.dtype = form, form == "powers", dtype
        self.x = rows(count, count, inputs, dtype, device)
        spread = torch.linspace(-3, 3, inputs, device=device).exp()  # blocks of different magnitudes
        self.x = (self.x.float() * spread).to(dtype)
        matrices = [noise(i, out, inputs, dtype=torch.float32, device="cpu") for i, out in enumerate(outs)]
        stored, scales = zip(*(by_definition(matrix * (i + 1), form) for i, matrix in enumerate(matrices)))
        self.exact = torch.cat([widened(*pair, form) for pair in zip(stored, scales)]).to(device)
        self.weight = torch.cat(stored).to(device)
        self.group = 1
        if form != "channel":
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
        """Tensor cores keep 14 bits of what they sum over a block."""
        size = float(wanted.abs().max()) * (1e-3 if got.is_cuda else 1e-5)
        assert got.dtype == self.dtype
        torch.testing.assert_close(got.double(), wanted, rtol=EPS[self.dtype], atol=size)


Run = Callable[..., torch.Tensor]
FORMATS = {"block": BY_BLOCK, "powers": BY_BLOCK_POWERS, "channel": BY_CHANNEL}
ROW_FORMS = {"block": RowForm.BLOCKS, "powers": RowForm.POWERS, "channel": RowForm.WHOLE}


def check_quantised(count: int, inputs: int, form: str, dtype: torch.dtype, device: str) -> None:
    """The kernel's numbers and scales are those of the definition, bit for bit; zeros stay zeros."""
    case = Case(count, inputs, (64,), form, dtype, device)
    case.x[-1] = 0
    got = quantise(case.x, ROW_FORMS[form])
    check_same(got, plain_fp8.quantise(case.x, ROW_FORMS[form]))
    width = inputs if form == "channel" else BLOCK
    each = got.scales_SN.t().repeat_interleave(width, 1)[:, :inputs]
    assert torch.equal(got.q_NI.float() * each, rows_by_definition(case.x.double(), form).float())
    assert torch.equal(got.q_NI.float() * each, plain_fp8.widened_rows(got))
    assert not bool(got.q_NI[-1].float().any())


def check_same(got: QuantisedRows, wanted: QuantisedRows) -> None:
    """Bit for bit."""
    assert (got.dtype, got.form, got.shape) == (wanted.dtype, wanted.form, wanted.shape)
    assert torch.equal(got.q_NI.view(torch.uint8), wanted.q_NI.view(torch.uint8))
    assert torch.equal(got.scales_SN, wanted.scales_SN)


def check_quantised_norms(ops: Ops, count: int, width: int, form: str, dtype: torch.dtype, device: str) -> None:
    """What a norm makes is quantised as if it had been stored, whatever is added first; so is the sum stored."""
    x, delta = (Case(count, width, (64,), form, dtype, device).x * factor for factor in (1, 3))
    weight, kept = noise(3, width, dtype=dtype, device=device), x.clone()
    x[-1], kept[-1], delta[-1] = 0, 0, 0
    parts = noise(4, count, 3, width, dtype=dtype, device=device)
    of = Parts(parts, noise(5, count, 3, dtype=torch.float32, device=device).abs(), delta)
    asked = weight, 1e-5, ROW_FORMS[form]
    for given, (wanted, normed) in (
        (None, (kept, ops.norm(x, weight, 1e-5))),
        (delta, ops.add_norm(delta.clone(), x, weight, 1e-5)),
        (of, ops.combine_norm(of, x, weight, 1e-5)),
    ):
        for keeps_dense in (False, True):
            added = given.clone() if isinstance(given, torch.Tensor) else given
            total, got = ops.norm_quantised(x, *asked, added, keeps_dense=keeps_dense)
            assert torch.equal(total, wanted) and torch.equal(x, kept)
            check_same(got, quantise(normed, asked[2]))
            assert torch.equal(dense_of(got), normed) if keeps_dense else got.dense_NI is None


def check_quantised_gate(ops: Ops, count: int, width: int, form: str, dtype: torch.dtype, device: str) -> None:
    x = Case(count, 2 * width, (64,), form, dtype, device).x
    for activation in ("silu", "gelu_tanh"):
        got = ops.gate_quantised(x, activation, ROW_FORMS[form])
        check_same(got, quantise(ops.gate(x, activation), ROW_FORMS[form]))


def product(
    x: Rows, weight_OI: torch.Tensor, scale: torch.Tensor, *asked: Any, powers: bool = False, **how: Any
) -> torch.Tensor:
    """`fp8.product` of rows that are quantised first, if they are not yet."""
    return fp8.product(quantised(x, form_of(scale, powers)), weight_OI, scale, *asked, **how)


def check_given_rows(case: Case) -> None:
    """A layer's rows that are already quantised give the bits of rows that are not, and what the gate makes may be
    quantised."""
    case.x *= case.x.shape[1] ** -0.5  # in 16 bits the gated product would overflow
    form = ROW_FORMS[case.form]
    rows, made = quantise(case.x, form), RowForm.POWERS if case.powers else RowForm.BLOCKS
    for arrivals in (None, no_arrivals(case.x.device)):
        layer = FP8Product(form, arrivals, library=False)
        for bias in (None, case.bias):
            asked = case.weight, case.scale, bias
            assert torch.equal(layer(rows, *asked), layer(case.x, *asked))
            wanted = quantise(fp8.product(rows, *asked, "silu"), made)
            check_same(gated_product(rows, *asked, "silu", made), wanted)
        fast_rows = gated_product(rows, case.weight, case.scale, None, "silu", made, arrivals=arrivals)
        dense = fp8.product(rows, case.weight, case.scale, None, "silu", arrivals=arrivals)
        close = plain_fp8.widened_rows(fast_rows) - dense.float()
        assert float(close.abs().max()) <= 2**-4 * float(dense.abs().max())


def check_product(case: Case, run: Run | None = None) -> None:
    """The result is the product by definition, with and without a bias."""
    run = run or partial(product, powers=case.powers)
    for bias in (None, case.bias):
        case.close(run(case.x, case.weight, case.scale, bias), case.wanted(bias is not None))


def check_gated(case: Case, activation: str) -> None:
    """The result is the gate applied to the product, which is rounded before it. An activation near 0 of a large number
    is as exact as float32 is near that number."""
    run = partial(product, case.x, case.weight, case.scale, powers=case.powers)
    for bias in (None, case.bias):
        made = run(bias).float()
        wanted = PlainOps().gate(made, activation)
        got = run(bias, activation)
        gate, up = made.chunk(2, 1)
        room = 1.1 * torch.finfo(case.dtype).eps * wanted.abs() + 1e-7 * (gate * up).abs() + 1e-6
        assert bool(((got.float() - wanted).abs() <= room).all())


def check_tiles(case: Case) -> None:
    """All tiles add in the same order, gated or not."""
    whole, gated = (product(case.x, case.weight, case.scale, case.bias, how, tile=TILES[0]) for how in (None, "silu"))
    wanted, x = quantise(gated, RowForm.BLOCKS), quantise(case.x, ROW_FORMS[case.form])
    for tile in TILES[1:]:
        assert torch.equal(product(case.x, case.weight, case.scale, case.bias, tile=tile), whole), tile
        if tile.outputs == 64:
            again = product(case.x, case.weight, case.scale, case.bias, "silu", tile=tile)
            assert torch.equal(again, gated), tile
        elif tile.outputs == BLOCK:
            got = gated_product(x, case.weight, case.scale, case.bias, "silu", RowForm.BLOCKS, tile=tile)
            check_same(got, wanted)


def check_sums_in_parts(case: Case, parts: int, repeats: int = 1) -> None:
    """The parts of a sum, each as exact as a product of its own, are added first to last, whichever program is the last
    one; the counts end at zero. Or they are left as they are. case: by block, in float32, of so few rows that sums are
    taken in parts."""
    arrivals, (count, inputs) = no_arrivals(case.x.device), case.x.shape
    assert arrivals.numel() and not bool(arrivals.any())
    step = choose_tile(count, len(case.bias), False, case.x.device).inputs
    each = -(-inputs // (step * parts)) * step
    wanted = torch.zeros(count, len(case.bias), device=case.x.device)
    assert number_of_parts(count, case.weight) == parts
    left = left_in_parts(quantise(case.x, RowForm.BLOCKS), case.weight, case.scale)
    assert left.shape == (count, parts, len(case.bias))
    for part, start in enumerate(range(0, inputs, each)):
        scale = case.scale[:, start // BLOCK : (start + each) // BLOCK].contiguous()
        weight = case.weight[:, start : start + each].contiguous()
        summed = product(case.x[:, start : start + each], weight, scale, None)
        assert torch.equal(left[:, part], summed)
        wanted += summed
    for bias in (None, case.bias) * repeats:
        got = product(case.x, case.weight, case.scale, bias, arrivals=arrivals)
        assert torch.equal(got, wanted if bias is None else wanted + bias)
        assert not bool(arrivals.any())


def check_parts_left_to_a_norm(case: Case, dtype: torch.dtype) -> None:
    """Whoever adds the parts, the stream and its norm have the same bits. case: of so few rows that sums are taken in
    parts, here in this dtype."""
    device, ops, x = case.x.device, TritonOps(), case.x.to(dtype)
    run = FP8Product(ROW_FORMS[case.form], no_arrivals(device), False, ones_of_parts(device))
    parts = run.parts(x, case.weight, case.scale, None)
    assert parts is not None and run.parts(x, case.weight, case.scale, case.bias) is None
    shapes = parts.parts_NKC[:, 0].shape, parts.parts_NKC.shape[2:]
    stream, weight = (noise(5, *shape, dtype=dtype, device=str(device)) for shape in shapes)
    got = ops.combine_norm(parts, stream, weight, 1e-6)
    wanted = ops.add_norm(stream.clone(), run(x, case.weight, case.scale, None), weight, 1e-6)
    assert all(map(torch.equal, got, wanted))


class ExpertsCase:
    """Random rows, choices, and experts' matrices by definition, in a layer of a mixture."""

    def __init__(
        self, count: int, experts: int, each: int, width: int, inner: int, form: str, dtype: torch.dtype, device: str
    ) -> None:
        self.form, self.powers, self.dtype, self.device = form, form == "powers", dtype, device
        spec = MixtureSpec(moe_intermediate_size=inner, routing=Routing(num_experts=experts, num_experts_per_tok=each))
        with torch.device("meta"):
            layer = Experts(spec, Site(0, width, 1e-6, Ropes(1)))
        layer.store_as(FORMATS[form])
        self.layer = screaming(layer, dtype, torch.device(device)).requires_grad_(False)
        self.matrices: dict[str, torch.Tensor] = {}
        tensors = {}
        for seed, (name, slot) in enumerate(self.layer.slots()):
            if not name.endswith(".weight"):
                continue
            shape = (slot.stop - slot.start, inner if slot.name == "down" else width)
            matrix = noise(seed, *shape, dtype=torch.float32, device="cpu") * shape[1] ** -0.5 * (1 + seed % 3)
            stored, scale = by_definition(matrix, form)
            tensors[name], tensors[name.removesuffix("weight") + SCALES[form]] = stored, scale
            self.matrices[name.removesuffix(".weight")] = widened(stored, scale, form)
        fill(self.layer, iter(tensors.items()), Path("x"))
        self.x = rows(1, count, width, dtype, device)
        scores = noise(4, count, experts, dtype=torch.float32, device="cpu")
        scores[: count // 2, : max(each, experts // 8)] += 100  # skewed
        self.chosen = scores.topk(each).indices.to(device)

    def run(self, products: ExpertProducts, ops: Ops, part: Any = slice(None)) -> torch.Tensor:
        return products(self.inputs(self.chosen[part], part), ops)

    def inputs(self, chosen_NK: torch.Tensor, part: Any = slice(None)) -> ExpertsInput:
        return ExpertsInput(self.x[part], chosen_NK, self.layer.gate_up, self.layer.down, "silu")

    def check_parts(self, products: ExpertProducts, ops: Ops) -> None:
        """Each part is its expert's product by definition of what the gate made, and a row's bits are its own."""
        got = self.run(products, ops)
        assert got.dtype == self.dtype
        form = form_of(self.layer.get_parameter("gate_up_scale"), self.powers)
        given = replace(quantise(self.x, form), dense_NI=self.x)
        assert torch.equal(products(replace(self.inputs(self.chosen), x=given), ops), got)
        for row, expert in [(0, 0), (len(self.x) // 2, 1), (len(self.x) - 1, 0)]:
            name = str(int(self.chosen[row, expert]))
            x = rows_by_definition(self.x[row : row + 1].cpu().double(), self.form)
            gate, up = ((x @ self.matrices[f"{name}.{part}_proj"].t()).to(self.dtype) for part in ("gate", "up"))
            # Kernels round a gated number once.
            inner = PlainOps().gate(torch.cat((gate, up), 1).float(), "silu").to(self.dtype).double()
            wanted = rows_by_definition(inner, self.form) @ self.matrices[f"{name}.down_proj"].t()
            # A number of the gate's may be rounded to the next one of e4m3, a sixteenth away; on a GPU, whose sums are
            # less exact, so may all be, if the largest differs in its last bit and with it their scale.
            size = float(wanted.square().mean().sqrt())
            missed = got[row, expert].cpu().double() - wanted[0]
            assert float(missed.abs().max()) < (0.15 if got.is_cuda else 0.02) * size
            assert float(missed.square().mean().sqrt()) < (0.06 if got.is_cuda else 0.01) * size
        count = len(self.x)
        for part in (slice(1), slice(count - 1, count), slice(0, count, 2), slice(count // 3, count // 2 + 1)):
            assert torch.equal(self.run(products, ops, part), got[part]), part
