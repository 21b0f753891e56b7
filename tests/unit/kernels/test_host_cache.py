"""The CPU's kernels give the same bits in the process that compiles them and in those that load them from disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stridelm.kernels.host import simd

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


LAYERS = """
import os, sys
import torch
from stridelm import LLM, SamplingParams

torch.set_num_threads(1)
params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3)
answers = LLM(drafter="mtp", depth=3).generate("def read(path):", params)
made = sum(name.endswith(".nbc") for _, _, names in os.walk(os.environ["NUMBA_CACHE_DIR"]) for name in names)
print([(token, entry.logprob) for row in answers[0].outputs[0].logprobs for token, entry in row.items()])
print(made, file=sys.stderr)
"""


def run_twice(directory: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], ...]:
    """A program, first without compiled kernels."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(directory)}
    command = [sys.executable, "-c", *arguments]
    return tuple(
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=True) for _ in range(2)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_run_and_later_ones_agree(dtype: str, tmp_path: Path) -> None:
    first, later = run_twice(tmp_path, PROGRAM, dtype)
    assert (first.stderr.split()[-1], later.stderr.split()[-1]) == ("0", "2"), "neither compiled nor read"
    assert first.stdout == later.stdout


@pytest.mark.skipif(not simd.is_available(), reason="no instructions for layers in one call")
def test_layers_agree_too(tmp_path: Path) -> None:
    first, later = run_twice(tmp_path, LAYERS)
    assert first.stderr.split()[-1] == later.stderr.split()[-1] != "0", "compiled again"
    assert first.stdout == later.stdout
