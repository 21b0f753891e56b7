"""Compiles attention over expanded latents, and what makes few rows' queries, for an H100 that is not there, in
published sizes, and prints as JSON what the kernels became.

Run as a process of its own, since it changes Triton for good: python -m support.checks.latent_compiles
"""

from __future__ import annotations

import itertools
import json
from unittest.mock import patch

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stridelm.attention.triton_latents import TritonLatents
from stridelm.cache.layout import FULL, LatentKV
from stridelm.kernels import attention_plan
from stridelm.kernels.head_products import head_products
from stridelm.kernels.latent_queries import latent_queries
from stridelm.kernels.ops import LatentRope
from support.checks.kv_compiles import CPU, FOUND, compile_only
from support.doubles.absent_gpu import Driver

STATE = LatentKV(FULL, None, 16, 512, 64, 0.07, expands=(128, 128))


def compile_queries(dtype: torch.dtype, rows: int) -> None:
    heads, width, rope_dim, rank = STATE.heads, 128, STATE.rope_dim, STATE.rank
    made = torch.zeros(rows, heads * (width + rope_dim) + rank + rope_dim, dtype=dtype)
    q, rows_NC = made.split((heads * (width + rope_dim), rank + rope_dim), dim=1)
    q_NHD, turned_NHK = q.view(rows, heads, -1).split((width, rope_dim), dim=2)
    keys_HDR = torch.zeros(heads, 2 * width, rank, dtype=dtype)[:, :width]
    places, angles = torch.zeros(rows, dtype=torch.int64), torch.zeros(8, rope_dim // 2)
    rope = LatentRope(places, angles, angles, torch.ones(rank, dtype=dtype), 1e-6, True)
    latent_queries(q_NHD, keys_HDR, turned_NHK, rows_NC, rope, torch.zeros(16, rank + rope_dim, dtype=dtype), places)
    head_products(torch.zeros(rows, heads, rank, dtype=dtype), keys_HDR.transpose(1, 2))


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    with patch.object(attention_plan, "multiprocessors", lambda device: 132):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            TritonLatents.warm_up_expanded(STATE, dtype, 16, CPU)
        for dtype, rows in itertools.product((torch.bfloat16, torch.float16), (1, 33)):
            compile_queries(dtype, rows)
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
