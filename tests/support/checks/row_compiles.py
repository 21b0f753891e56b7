"""Compiles norms of rows, alone and after sums of experts' parts, for an H100 that is not there, in published widths,
and prints as JSON what its kernels became.

Run as a process of its own, since it changes Triton for good: python -m support.checks.row_compiles
"""

from __future__ import annotations

import json

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stridelm.kernels.ops import Parts
from stridelm.kernels.triton_norms import combine_norm, norm
from support.checks.kv_compiles import FOUND, compile_only
from support.doubles.absent_gpu import Driver

SIZES = ((2048, 8, False), (2048, 6, True), (7168, 8, True))
"""Width, parts, and whether there is a shared expert, of Qwen3-30B-A3B, DeepSeek-V2-Lite and DeepSeek-V3."""


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    for width, each, is_shared in SIZES:
        x, weight = torch.zeros(4, 2 * width, dtype=torch.bfloat16), torch.zeros(width, dtype=torch.bfloat16)
        norm(x[:, width:], None, weight, 1e-6)
        parts, shared = torch.zeros(4, each, width, dtype=torch.bfloat16), x[:, :width] if is_shared else None
        combine_norm(Parts(parts, torch.zeros(4, each), shared), x[:, :width].contiguous(), weight, 1e-6)
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
