"""Compiles attention over expanded latents for an H100 that is not there, in published sizes, and prints as JSON what
its kernels became.

Run as a process of its own, since it changes Triton for good: python -m support.checks.latent_compiles
"""

from __future__ import annotations

import json
from unittest.mock import patch

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stridelm.attention.triton_latents import TritonLatents
from stridelm.cache.layout import FULL, LatentKV
from stridelm.kernels import attention_plan
from support.checks.kv_compiles import CPU, FOUND, compile_only
from support.doubles.absent_gpu import Driver

STATE = LatentKV(FULL, None, 16, 512, 64, 0.07, expands=(128, 128))


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    with patch.object(attention_plan, "multiprocessors", lambda device: 132):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            TritonLatents.warm_up_expanded(STATE, dtype, 16, CPU)
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
