"""The CPU's kernels give the same bits in the process that compiles them and in those that load them from disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import hashlib, sys
import numpy as np
import torch
from stridelm.kernels.host import attention, pair_attention, rows
from stridelm.kernels.host.arithmetic import follow_torch
from stridelm.kernels.host.memory import array

torch.set_num_threads(1)
follow_torch()
draw, dtype = torch.Generator().manual_seed(0), getattr(torch, sys.argv[1])

def random(*shape):
    return torch.randn(*shape, generator=draw).to(dtype)

keys, values, q, x, weight = random(600, 2, 64), random(600, 2, 64), random(37, 6, 64), random(37, 384), random(384)
slots, limits = np.arange(560)[None] + 16, np.arange(37) + 400
tiles = np.array([[0, 0, 12], [0, 12, 12], [0, 24, 12], [0, 36, 1]])
attended, normed = torch.empty_like(q), torch.empty_like(x)
where = (slots, tiles, limits, limits.copy(), np.zeros(37, np.int64), sys.maxsize, np.float32(0.125))
pairs = dtype == torch.bfloat16 and pair_attention.fits(64, 64)
attend = pair_attention.attend if pairs else attention.attend
attend(array(q), array(keys), array(values), *where, array(attended))
rows.norm(array(x), array(weight), 1e-5, array(normed))
for out in (attended, normed):
    print(hashlib.sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest())
read = sum(sum(kernel.stats.cache_hits.values()) for kernel in (attend, rows.norm))
print(read, file=sys.stderr)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_run_and_later_ones_agree(dtype: str, tmp_path: Path) -> None:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, dtype]
    first, later = (
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True) for _ in range(2)
    )
    assert (first.stderr.split()[-1], later.stderr.split()[-1]) == ("0", "2"), "neither compiled nor read"
    assert first.stdout == later.stdout
