"""Compiles products of 16-bit weights for an H100 that is not there, in every tile, with and without a bias and a gate,
and prints as JSON what they became.

Run as a process of its own, since it changes Triton for good: python -m support.checks.product_compiles
"""

from __future__ import annotations

import json

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stridelm.kernels.products import product
from support.checks.kv_compiles import FOUND, compile_only
from support.doubles.absent_gpu import Driver

ROWS = (1, 32, 64, 128)
"""A tile of each height."""
OUTPUTS = (4096, 128256)
"""Of which the second fills a card with tiles of 128."""
INPUTS = 4096


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    for rows in ROWS:
        x = torch.empty(rows, INPUTS, dtype=torch.bfloat16)
        for outputs in OUTPUTS:
            product(x, torch.empty(outputs, INPUTS, dtype=torch.bfloat16, device="meta"), None)
        gate_up = torch.empty(2 * OUTPUTS[0], INPUTS, dtype=torch.bfloat16)
        product(x, gate_up, gate_up[:, 0].contiguous())
        product(x, gate_up, None, "silu")
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
