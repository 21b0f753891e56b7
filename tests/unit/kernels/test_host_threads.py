"""The CPU's kernels use as many threads as torch does, and leave torch's number unchanged."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
{first}
asked = torch.get_num_threads()
from stridelm.kernels.host.ops import HostOps
HostOps().prepare(torch.float32)
import numba
print(asked, torch.get_num_threads(), numba.get_num_threads())
"""


@pytest.mark.parametrize(
    ("first", "environment", "expected"),
    [
        ("", {"OMP_NUM_THREADS": "1"}, "1 1 1"),
        ("", {"OMP_NUM_THREADS": "2"}, "2 2 2"),
        ("torch.set_num_threads(1)", {"OMP_NUM_THREADS": "2"}, "1 1 1"),
        ("", {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "1"}, "2 2 1"),
    ],
    ids=["environment", "two", "call", "fewer-than-torch"],
)
def test_threads(first: str, environment: dict[str, str], expected: str) -> None:
    """In a separate process: workers are started once, at the first call."""
    if len(os.sched_getaffinity(0)) < 2:  # numba starts no more threads than it may use cores
        pytest.skip("needs two cores")
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == expected, done.stderr
