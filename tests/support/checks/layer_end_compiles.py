"""Compiles the kernels that end a layer with norms on both sides and an input of its own for an H100 that is not
there, in every form that Gemma 4's widths have, and prints as JSON what they became.

Run as a process of its own, since it changes Triton for good: python -m support.checks.layer_end_compiles
"""

from __future__ import annotations

import itertools
import json

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stridelm.kernels.products import product
from stridelm.kernels.triton_rows import TritonOps
from support.checks.kv_compiles import FOUND, compile_only
from support.doubles.absent_gpu import Driver

WIDTHS = (256, 1024, 1536, 2560, 2816, 5376)
"""Of the published models and of their assistants."""
WITH_INPUTS, INPUT = (1536, 2560), 256
"""Of the models whose layers have inputs of their own, and of such an input."""


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    for width in WIDTHS:
        x, delta = torch.zeros(2, 3, width, dtype=torch.bfloat16)
        after = torch.ones(width, dtype=torch.bfloat16)
        for factor in (None, after[:1]):
            for weight in (None, after):
                TritonOps().add_normed(x, delta, after, 1e-6, factor, weight)
    for width, rows in itertools.product(WITH_INPUTS, (1, 64)):
        x, weight = torch.zeros(rows, width, dtype=torch.bfloat16), torch.zeros(INPUT, width, dtype=torch.bfloat16)
        given = torch.zeros(rows, 42, INPUT, dtype=torch.bfloat16)[:, 1]
        TritonOps().gate(product(x, weight, None, "gelu_tanh", given), "gelu_tanh", given)
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
