"""Compiles experts' products, by themselves and beside a shared MLP's, for an H100 that is not there, in tiles of every
height, and prints as JSON what they became.

Run as a process of its own, since it changes Triton for good: python -m support.checks.expert_compiles
"""

from __future__ import annotations

import json

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stridelm.kernels.experts import expert_parts
from stridelm.kernels.shared_experts import MAX_ROWS, expert_parts_and_shared
from support.checks.kv_compiles import CASE, FOUND, compile_only
from support.doubles.absent_gpu import Driver

ROWS = (1, 16, 20, 64, 2048)
"""With pairs that are not sorted, and in tiles of one height, two, three, and three taller ones."""


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    number, each, width, inner = 8, 2, 256, 192
    gate_up, down = torch.zeros(number * 2 * inner, width).bfloat16(), torch.zeros(number * width, inner).bfloat16()
    shared = torch.zeros(2 * inner, width).bfloat16(), torch.zeros(width, inner).bfloat16()
    for rows in ROWS:
        CASE["rows"] = rows
        x, chosen = torch.zeros(rows, width, dtype=torch.bfloat16), torch.zeros(rows, each, dtype=torch.int64)
        expert_parts(x, chosen, gate_up, down, "silu")
        if rows <= MAX_ROWS:
            expert_parts_and_shared(x, chosen, gate_up, down, x, *shared, "silu")
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
