"""Compiles the kernels of weights in eight bits for an H100 that is not there, and prints as JSON what they became.

Run as a process of its own, since it changes Triton for good: python -m support.checks.fp8_compiles
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product as pairs_of
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stridelm.kernels.fp8 import gated_product, left_in_parts, no_arrivals, product
from stridelm.kernels.fp8_experts import expert_parts
from stridelm.kernels.plain_fp8 import BLOCK
from stridelm.kernels.products import Tile
from stridelm.kernels.quantise import quantise
from stridelm.kernels.row_forms import QuantisedRows, RowForm
from support.checks.before_waiting import known_of
from support.doubles.absent_gpu import Driver, stack_bytes

DENSE = [(1, 6144, None), (16, 28672, "silu"), (64, 28672, "silu"), (40, 4096, None), (300, 4096, None)]
DENSE += [(2048, 28672, None)]
"""Rows, outputs and activation, of 4,096 inputs."""
SEVERAL = Tile(64, 8, 256, warps=4, stages=8), Tile(64, 16, 256, warps=4, stages=6), Tile(64, 8, 512, warps=4, stages=4)
"""Tiles of products of several blocks."""
FOUND: list[dict[str, Any]] = []


def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
    def launch(*args: Any, **options: Any) -> None:
        made = kernel.warmup(*args, grid=grid, **{**options, "DEPENDENT": True, "launch_pdl": True})
        if kernel.__name__ == "_sort_kernel":
            return
        code = made.asm["ptx"]
        FOUND.append(
            {
                **known_of(kernel, made),
                "shared": made.metadata.shared,
                "instructions": len(re.findall(r"wgmma\.mma_async\S*e4m3\.e4m3", code)),
                "others": len(re.findall(r"\bmma\.sync", code)),
                "stack": stack_bytes(made.asm["cubin"]),
            }
        )

    return launch


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float8_e4m3fn)


def scales_of(weight_OI: torch.Tensor, by_block: bool) -> torch.Tensor:
    outputs, inputs = weight_OI.shape
    shape = (outputs // BLOCK, inputs // BLOCK) if by_block else (outputs, 1)
    return torch.empty(shape)


def made_rows(rows: int, form: RowForm) -> QuantisedRows:
    return quantise(torch.empty(rows, 4096, dtype=torch.bfloat16), form)


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    for by_block in (True, False):
        form = RowForm.BLOCKS if by_block else RowForm.WHOLE
        for rows, outputs, activation in DENSE if by_block else DENSE[::2]:
            x = made_rows(rows, form)
            weight = empty(outputs, 4096)
            for arrivals in (None, no_arrivals(torch.device("cpu"))):
                asked = x, weight, scales_of(weight, by_block), None
                product(*asked, activation, arrivals=arrivals)
                if activation is not None:
                    gated_product(*asked, activation, RowForm.BLOCKS, arrivals=arrivals)
        for rows in (1, 40):
            weight = empty(2048, 4096)
            left_in_parts(made_rows(rows, form), weight, scales_of(weight, by_block))
        for tile in SEVERAL:
            weight = empty(4096, 4096)
            arrivals = no_arrivals(torch.device("cpu"))
            product(made_rows(tile.rows, form), weight, scales_of(weight, by_block), None, arrivals=arrivals, tile=tile)
        for rows, inner in pairs_of((1, 16, 4096), (128, 256)):
            chosen = torch.zeros(rows, 2, dtype=torch.int64)
            wide = quantise(torch.empty(rows, 256, dtype=torch.bfloat16), form)
            matrices = [empty(8 * 2 * inner, 256), empty(8 * 256, inner)]
            gate_up, down = ((matrix, scales_of(matrix, by_block)) for matrix in matrices)
            expert_parts(wide, chosen, gate_up, down, "silu", form)
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
