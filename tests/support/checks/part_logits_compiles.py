"""Compiles the kernels of a part of the vocabulary's logits for an H100 that is not there, at the sizes of Gemma 4's
assistants and at odd ones, and prints as JSON what they became.

Run as a process of its own, since it changes Triton for good: python -m support.checks.part_logits_compiles
"""

from __future__ import annotations

import json

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stridelm.kernels.triton_rows import TritonOps
from support.checks.kv_compiles import FOUND, compile_only
from support.doubles.absent_gpu import Driver

SIZES = [(256, 2048 * 128, 2048, 32), (1024, 2048 * 128, 2048, 32), (300, 370, 37, 1)]
"""(hidden width, tokens, centroids, how many are chosen)."""


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    for width, vocab_size, count, best in SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            x, scores = torch.zeros(3, width, dtype=dtype), torch.zeros(3, count, dtype=dtype)
            weight, ids = torch.empty(vocab_size, width, dtype=dtype), torch.arange(vocab_size).view(count, -1)
            TritonOps().part_logits(x, scores, weight, ids, best)
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
