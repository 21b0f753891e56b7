"""A group of gpu_kernels.py: products whose sums may be left in parts, each with the norm that reads it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fp8_kernels import drawn_fp8
from kernel_sections import Section, Settings, calls_past_cache, right_table
from timing import graph_us

PARTS_SHAPES = {"30B o": (2048, 4096), "V2-Lite o": (2048, 2048), "8B o": (4096, 4096), "8B down": (4096, 14336)}
"""Outputs and inputs."""
PARTS_ROWS = (1, 4, 16, 32, 64)
EPS = 1e-6


def parts(settings: Settings) -> Section:
    found: list[dict[str, Any]] = []
    for shape, rows in itertools.product(PARTS_SHAPES, PARTS_ROWS):
        us = {name: graph_us(calls, settings.replays) for name, calls in parts_calls(shape, rows).items()}
        outputs, inputs = PARTS_SHAPES[shape]
        found.append(
            {"shape": shape, "rows": rows, "us": us, "floor_us": 2 * outputs * inputs / settings.bandwidth / 1e6}
        )
    columns = ("16 bits, whole", "in parts", "floor", "8 bits, whole", "in parts", "floor")
    table = right_table("product and norm, us", "product", "rows", *columns)
    for row in found:
        whole, in_parts, whole_8, parts_8 = (f"{us:.2f}" for us in row["us"].values())
        floor = row["floor_us"]
        table.add_row(
            row["shape"], str(row["rows"]), whole, in_parts, f"{floor:.2f}", whole_8, parts_8, f"{floor / 2:.2f}"
        )
    return Section([table], found)


def parts_calls(shape: str, rows: int) -> dict[str, list[Callable[[], Any]]]:
    """Calls over copies of the weight that exceed the cache. In eight bits, rows are quantised already, and whole sums
    are added by the last program of a tile."""
    from stridelm.kernels.fp8 import no_arrivals
    from stridelm.kernels.quantise import quantise
    from stridelm.kernels.row_forms import RowForm
    from stridelm.kernels.triton_rows import TritonOps
    from stridelm.models.layers.fp8 import FP8Product
    from stridelm.models.layers.products import InOrderProduct, ones_of_parts

    (outputs, inputs), ops = PARTS_SHAPES[shape], TritonOps()
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    stream, weight = (torch.randn(*size, device="cuda").bfloat16() for size in ((rows, outputs), (outputs,)))
    ones, quantised = ones_of_parts(x.device), quantise(x, RowForm.BLOCKS)
    dense = InOrderProduct(False, ones)
    eight = FP8Product(RowForm.BLOCKS, no_arrivals(x.device), False, ones)
    copies = calls_past_cache(2 * outputs * inputs)
    weights = [torch.randn(outputs, inputs, device="cuda").bfloat16() * inputs**-0.5 for _ in range(copies)]
    narrow = [drawn_fp8(outputs, inputs) for _ in range(calls_past_cache(outputs * inputs))]

    def whole(matrix: torch.Tensor) -> object:
        return ops.add_norm(dense(x, matrix, None), stream, weight, EPS)

    def in_parts(matrix: torch.Tensor) -> object:
        left = dense.parts(x, matrix, None)
        assert left is not None
        return ops.combine_norm(left, stream, weight, EPS)

    def whole_8(matrix: torch.Tensor, scale: torch.Tensor) -> object:
        return ops.norm_quantised(stream, weight, EPS, RowForm.BLOCKS, eight(quantised, matrix, scale, None))

    def in_parts_8(matrix: torch.Tensor, scale: torch.Tensor) -> object:
        left = eight.parts(quantised, matrix, scale, None)
        assert left is not None
        return ops.norm_quantised(stream, weight, EPS, RowForm.BLOCKS, left)

    return {
        "whole": [partial(whole, matrix) for matrix in weights],
        "in_parts": [partial(in_parts, matrix) for matrix in weights],
        "whole_fp8": [partial(whole_8, *pair) for pair in narrow],
        "in_parts_fp8": [partial(in_parts_8, *pair) for pair in narrow],
    }
