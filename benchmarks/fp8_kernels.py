"""Groups of gpu_kernels.py: products with weights in eight bits, and the dense ones with other tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from expert_kernels import EACH, EXPERT_CALLS, EXPERTS, INNER, WIDTH, expert_tiles_table
from kernel_sections import L2_BYTES, Section, Settings, calls_past_cache, right_table
from rich.table import Table
from timing import graph_us

from stridelm.kernels.expert_pairs import Tiled
from stridelm.kernels.products import Tile
from stridelm.kernels.row_forms import QuantisedRows, RowForm, Rows

FP8_SHAPES = {
    "8B qkv": (6144, 4096, None),
    "8B o": (4096, 4096, None),
    "8B gate and up": (28672, 4096, "silu"),
    "8B down": (4096, 14336, None),
    "30B qkv": (5120, 2048, None),
    "30B o": (2048, 4096, None),
}
"""Outputs, inputs, and the activation of a gated product."""
FP8_ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
MANY_ROWS = (64, 128, 192, 256, 512, 1024, 2048, 4096)


def drawn_fp8(outputs: int, inputs: int, group: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, scales by block)."""
    drawn = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    scale = torch.full((-(-outputs // group), -(-inputs // 128)), inputs**-0.5, device="cuda")
    return drawn.to(torch.float8_e4m3fn), scale


def fp8_calls(shape: str, rows: int, **options: Any) -> dict[str, list[Callable[..., Any]]]:
    """Calls over copies of the weight that exceed the cache: as served, with the rows' quantisation and with rows that
    are quantised already, as norms and gates make them; that quantisation alone; and bfloat16's. options: of our
    kernel, which then runs for any number of rows."""
    from stridelm.kernels.fp8 import FUSED_ROWS, gated_product, no_arrivals
    from stridelm.kernels.fp8 import product as by_our_kernel
    from stridelm.kernels.quantise import quantise
    from stridelm.kernels.quantise import quantised as in_form
    from stridelm.kernels.triton_rows import TritonOps
    from stridelm.models.layers.fp8 import chosen
    from stridelm.models.layers.products import InOrderProduct

    outputs, inputs, activation = FP8_SHAPES[shape]
    copies = calls_past_cache(outputs * inputs)
    weights = [drawn_fp8(outputs, inputs) for _ in range(copies)]
    wide = [weight.bfloat16() for weight, _ in weights[: max(4, copies // 2)]]
    x, dense, ops = torch.randn(rows, inputs, device="cuda").bfloat16(), InOrderProduct(False), TritonOps()
    asked = {"arrivals": no_arrivals(x.device), **options}  # on one stream, all calls may share it
    quantised = quantise(x, RowForm.BLOCKS)
    served = chosen(*weights[0], deterministic=False, powers=False)

    def product(
        x: Rows, weight: torch.Tensor, scale: torch.Tensor, bias: None, *gate: Any, **trial: Any
    ) -> torch.Tensor:
        if options or rows <= FUSED_ROWS:
            return by_our_kernel(in_form(x, RowForm.BLOCKS), weight, scale, bias, *gate, **trial)
        assert trial.keys() <= asked.keys()
        return served(x, weight, scale, bias)

    def ours(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if activation is None or rows <= FUSED_ROWS:
            return product(x, weight, scale, None, activation, **asked)
        return ops.gate(product(x, weight, scale, None, **asked), activation)

    def given(weight: torch.Tensor, scale: torch.Tensor, **trial: Any) -> Rows:
        if activation is None:
            return product(quantised, weight, scale, None, **asked, **trial)
        if rows <= FUSED_ROWS:
            return gated_product(quantised, weight, scale, None, activation, RowForm.BLOCKS, **asked, **trial)
        return ops.gate_quantised(product(quantised, weight, scale, None, **asked), activation, RowForm.BLOCKS)

    def theirs(weight: torch.Tensor) -> object:
        if activation is None or dense.fuses_gate(x):
            return dense(x, weight, None, activation)
        return ops.gate(dense(x, weight, None), activation)

    return {
        "fp8": [partial(ours, *pair) for pair in weights],
        "given": [partial(given, *pair) for pair in weights],
        "quantise": [partial(quantise, x, RowForm.BLOCKS) for _ in weights],
        "bfloat16": [partial(theirs, weight) for weight in wide],
    }


def fp8(settings: Settings) -> Section:
    found = []
    for shape, rows in itertools.product(FP8_SHAPES, FP8_ROWS):
        outputs, inputs, _ = FP8_SHAPES[shape]
        us = {name: graph_us(calls, settings.replays) for name, calls in fp8_calls(shape, rows).items()}
        speed = outputs * inputs / us["fp8"] / 1e6
        found.append(
            {
                "shape": shape,
                "rows": rows,
                "us": us,
                "tb_per_s": speed,
                "of_bandwidth": speed / settings.bandwidth,
                "tflop_per_s": 2 * rows * outputs * inputs / us["fp8"] / 1e6,
            }
        )
    for rows in settings.expert_rows:
        us = {name: graph_us(calls, settings.replays) for name, calls in fp8_expert_calls(rows).items()}
        rate = 6 * rows * EACH * WIDTH * INNER / us["fp8"] / 1e6
        found.append({"shape": "30B experts", "rows": rows, "us": us, "tflop_per_s": rate})
    return Section([fp8_table(found)], found)


def fp8_expert_calls(rows: int) -> dict[str, list[Callable[[], object]]]:
    from stridelm.kernels import experts, fp8_experts
    from stridelm.kernels.quantise import quantise

    def ours(chosen: torch.Tensor) -> torch.Tensor:
        x_8 = quantise(x, RowForm.BLOCKS)
        return fp8_experts.expert_parts(x_8, chosen, gate_up, down, "silu", RowForm.BLOCKS)

    gate_up, down = drawn_fp8(EXPERTS * 2 * INNER, WIDTH), drawn_fp8(EXPERTS * WIDTH, INNER)
    wide_gate_up, wide_down = gate_up[0].bfloat16(), down[0].bfloat16()
    x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
    choices = [torch.randn(rows, EXPERTS, device="cuda").topk(EACH).indices for _ in range(EXPERT_CALLS)]
    return {
        "fp8": [partial(ours, chosen) for chosen in choices],
        "bfloat16": [partial(experts.expert_parts, x, chosen, wide_gate_up, wide_down, "silu") for chosen in choices],
    }


def fp8_table(found: list[dict[str, Any]]) -> Table:
    columns = ("quantise us", "fp8 us", "given us", "bfloat16 us", "ratio", "TB/s", "of bandwidth", "TFLOP/s")
    table = right_table("fp8", "product", "rows", *columns)
    for row in found:
        us = row["us"]
        table.add_row(
            row["shape"],
            str(row["rows"]),
            f"{us['quantise']:.1f}" if "quantise" in us else "-",
            f"{us['fp8']:.1f}",
            f"{us['given']:.1f}" if "given" in us else "-",
            f"{us['bfloat16']:.1f}",
            f"{us['bfloat16'] / us['fp8']:.2f}x",
            f"{row['tb_per_s']:.2f}" if "tb_per_s" in row else "-",
            f"{row['of_bandwidth']:.0%}" if "of_bandwidth" in row else "-",
            f"{row['tflop_per_s']:.0f}",
        )
    return table


def fp8_many(settings: Settings) -> Section:
    from stridelm.kernels.fp8 import no_arrivals, product
    from stridelm.kernels.fp8_library import can_multiply, multiply
    from stridelm.kernels.quantise import quantise

    found: list[dict[str, Any]] = []
    table = right_table("fp8_many", "product", "rows", "kernel us", "library us", "bfloat16 us", "ratio", "TFLOP/s")
    for shape, rows in itertools.product(FP8_SHAPES, MANY_ROWS):
        outputs, inputs, _ = FP8_SHAPES[shape]
        weights = [drawn_fp8(outputs, inputs) for _ in range(min(8, max(3, -(-L2_BYTES // (outputs * inputs)))))]
        if not can_multiply(*weights[0], None, RowForm.BLOCKS):
            continue
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        quantised, arrivals = quantise(x, RowForm.BLOCKS), no_arrivals(x.device)
        ways: dict[str, list[Callable[[], object]]] = {
            "kernel": [partial(product, quantised, *pair, None, arrivals=arrivals) for pair in weights],
            "library": [partial(multiply, quantised, *pair, None) for pair in weights],
            "bfloat16": [partial(F.linear, x, weight.bfloat16()) for weight, _ in weights],
        }
        us = {name: graph_us(calls, settings.replays) for name, calls in ways.items()}
        rate = 2 * rows * outputs * inputs / us["library"] / 1e6
        found.append({"shape": shape, "rows": rows, "us": us, "tflop_per_s": rate})
        times = (f"{us[name]:.1f}" for name in ways)
        table.add_row(shape, str(rows), *times, f"{us['bfloat16'] / us['library']:.2f}x", f"{rate:.0f}")
    return Section([table], found)


def fp8_tiles(settings: Settings) -> Section:
    from triton.runtime.errors import OutOfResources

    found = []
    for shape, rows in itertools.product(FP8_SHAPES, (1, 16, 64, 256, 2048)):
        height = next((size for size in (16, 32, 64) if rows <= size), 128)
        tiles: list[Tile | None] = [None]
        for outputs, warps, stages in itertools.product((64, 128), (4, 8), (3, 4, 6, 8)):
            tiles += [Tile(outputs, rows_of, 128, warps, stages) for rows_of in {height, max(16, height // 2)}]
        for tile in tiles:
            try:
                us = graph_us(fp8_calls(shape, rows, tile=tile)["fp8"], 2)
            except (RuntimeError, OutOfResources):  # too much shared memory
                continue
            name = "as chosen" if tile is None else str(astuple(tile))
            found.append({"rows": rows, "stage": shape, "form": name, "us": us})
    return Section([expert_tiles_table(found, "fp8: (outputs, rows, inputs, warps, stages)")], found)


TILED_ROWS = (1, 2, 4, 16, 64, 256)


def fp8_expert_tiles(settings: Settings) -> Section:
    from triton.runtime.errors import OutOfResources

    weights = drawn_fp8(EXPERTS * 2 * INNER, WIDTH), drawn_fp8(EXPERTS * WIDTH, INNER)
    found = []
    for rows in TILED_ROWS:
        layer = FP8Experts(rows, *weights)
        order = layer.orders[0]
        height, blocks = (order.heights.tallest, 1) if order.is_sorted else (8, 2)
        forms: list[tuple[int, int, int] | None] = [None]
        forms += [(64, 4, stages) for stages in (3, 4, 6)]
        forms += [(128, warps, stages) for warps in (4, 8) for stages in (2, 3, 4)]
        for stage, form in itertools.product(("gate and up", "gate and up, quantised", "down"), forms):
            tile = None if form is None else Tile(form[0], height, blocks * 128, *form[1:])
            if "quantised" in stage and (not order.is_sorted if tile is None else tile.outputs < 128):
                continue  # a tile has all outputs that share a scale, and a pair alone has no such tile
            try:
                us = graph_us(layer.calls(stage, tile), settings.replays)
            except (RuntimeError, OutOfResources):  # too much shared memory
                continue
            name = "as chosen" if tile is None else str(astuple(tile))
            found.append({"rows": rows, "stage": stage, "form": name, "us": us})
    return Section([expert_tiles_table(found, "fp8 experts: (outputs, pairs, inputs, warps, stages)")], found)


class FP8Experts:
    """Both products of a step's rows, which are quantised already."""

    def __init__(
        self, rows: int, gate_up: tuple[torch.Tensor, torch.Tensor], down: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        from stridelm.kernels.expert_pairs import one_height, tile_pairs
        from stridelm.kernels.quantise import quantise

        choices = [torch.randn(rows, EXPERTS, device="cuda").topk(EACH).indices for _ in range(EXPERT_CALLS)]
        self.gate_up, self.down = gate_up, down
        self.orders = [tile_pairs(chosen, EXPERTS, one_height) for chosen in choices]
        shapes = (rows, WIDTH), (self.orders[0].places, INNER)
        x, self.inner = (torch.randn(*shape, device="cuda").bfloat16() for shape in shapes)
        self.parts = x.new_empty(rows * EACH, WIDTH)
        self.x, self.gated = quantise(x, RowForm.BLOCKS), quantise(self.inner, RowForm.BLOCKS)

    def calls(self, stage: str, tile: Tile | None) -> list[Callable[[], object]]:
        """Of "down", or of "gate and up", which leaves rows as they are, to be quantised in a launch of its own, or
        quantises them."""
        from stridelm.kernels.fp8_experts import multiply
        from stridelm.kernels.quantise import quantise

        def run(order: Tiled) -> None:
            if stage == "down":
                multiply(self.gated, *self.down, order, EACH, self.parts, None, tile)
            elif "quantised" in stage:
                multiply(self.x, *self.gate_up, order, EACH, self.gated, "silu", tile)
            else:
                multiply(self.x, *self.gate_up, order, EACH, self.inner, "silu", tile)
                quantise(self.inner, RowForm.BLOCKS)

        return [partial(run, order) for order in self.orders]


STEP_SHAPES = tuple(shape for shape in FP8_SHAPES if shape.startswith("8B"))
STEP_ROWS = (1, 2, 4, 16, 64)
STEP_PARTS = (2, 4, 8)
PROCESSOR_BYTES = 220 << 10
"""What the stages of a processor's programs may fill."""


def step_tiles(rows: int, is_gated: bool) -> list[tuple[int, int, int, int, int]]:
    """Tiles for few rows, as (outputs, rows, inputs, warps, stages), with stages for one, two or four programs on a
    processor. First those whose products are of one block."""
    height, found = next(size for size in (8, 16, 32, 64) if rows <= size), []
    wide = (128,) if is_gated else (64, 128) if height == 64 else (64,)
    for blocks, outputs, programs in itertools.product((1, 2, 4), wide, (1, 2, 4)):
        rows_of = max(16, height) if blocks == 1 else height
        stage = blocks * 128 * (outputs * (1 + is_gated) + rows_of * blocks)
        stages = min(8, PROCESSOR_BYTES // programs // stage)
        if stages >= 2 and rows_of * blocks <= 128:
            found.append((outputs, rows_of, 128 * blocks, 8 if outputs == 128 else 4, stages))
    return list(dict.fromkeys(found))


def fp8_steps(settings: Settings) -> Section:
    from triton.runtime.errors import OutOfResources

    found = []
    for shape, rows in itertools.product(STEP_SHAPES, STEP_ROWS):
        calls, is_gated = fp8_calls(shape, rows), FP8_SHAPES[shape][2] is not None
        trials = {
            "as chosen": graph_us(calls["given"], settings.replays),
            "quantised apart": graph_us(calls["fp8"], settings.replays),
        }
        for parts in (None,) if is_gated else STEP_PARTS:
            in_order: Rows | None = None
            for numbers in step_tiles(rows, is_gated):
                options = {"tile": Tile(*numbers), **({} if parts is None else {"parts": parts})}
                trial = [partial(call, **options) for call in calls["given"]]
                name = f"{numbers} x {parts or 1}"
                try:
                    made = trial[0]()
                    trials[name] = graph_us(trial, 2)
                except (RuntimeError, OutOfResources):  # too much shared memory
                    continue
                in_order = made if in_order is None else in_order
                if not is_same(made, in_order):
                    trials[f"{name} OTHER BITS"] = trials.pop(name)
        found += [{"rows": rows, "stage": shape, "form": form, "us": us} for form, us in trials.items()]
    return Section([steps_table(found)], found)


def is_same(made: Rows, wanted: Rows) -> bool:
    """Bit for bit."""
    if isinstance(made, QuantisedRows):
        assert isinstance(wanted, QuantisedRows)
        same = torch.equal(made.scales_SN, wanted.scales_SN)
        return same and torch.equal(made.q_NI.view(torch.uint8), wanted.q_NI.view(torch.uint8))
    assert isinstance(wanted, torch.Tensor)
    return torch.equal(made, wanted)


def steps_table(found: list[dict[str, Any]]) -> Table:
    """The two ways that are served, and the best three of each number of blocks."""
    columns = ("rows quantised apart", "given", "best of 1 block", "of 2 blocks", "of 4 blocks", "with other bits")
    table = right_table("fp8 steps: (outputs, rows, inputs, warps, stages) x parts", "product", "rows", *columns)
    for shape, rows in dict.fromkeys((trial["stage"], trial["rows"]) for trial in found):
        us = {trial["form"]: trial["us"] for trial in found if (trial["stage"], trial["rows"]) == (shape, rows)}
        served = [f"{us.pop(name):.1f}" for name in ("quantised apart", "as chosen")]
        best = []
        for blocks in (1, 2, 4):
            some = sorted((time, name) for name, time in us.items() if f", {128 * blocks}, " in name)
            best.append("\n".join(f"{name}: {time:.1f}" for time, name in some[:3]))
        table.add_row(shape, str(rows), *served, *best, str(sum("OTHER" in name for name in us)))
    return table
